import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import Wav2Vec2Model

from iemocap import EmotionClips, pad_wavs


class EmotionNet(nn.Module):
    def __init__(self, n=4, name="facebook/wav2vec2-base"):
        super().__init__()
        self.w2v = Wav2Vec2Model.from_pretrained(name)
        self.w2v.feature_extractor._freeze_parameters()
        self.head = nn.Sequential(nn.Linear(768, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, n))

    def forward(self, wav):
        return self.head(self.w2v(wav).last_hidden_state.mean(1))


def unweighted_recall(net, loader, device, n=4):
    net.eval()
    hit, tot = torch.zeros(n), torch.zeros(n)
    with torch.no_grad():
        for wav, y in loader:
            pred = net(wav.to(device)).argmax(1).cpu()
            for c in range(n):
                tot[c] += (y == c).sum()
                hit[c] += ((y == c) & (pred == c)).sum()
    return (hit / tot.clamp_min(1)).mean().item()


def train_epoch(net, loader, opt, device, class_weight):
    net.train()
    mean, k = 0.0, 0
    for wav, y in loader:
        wav, y = wav.to(device), y.to(device)
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            logits = net(wav)
            loss = F.cross_entropy(logits, y, weight=class_weight)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        mean += loss.item()
        k += 1
    return mean / k


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--fold", type=int, default=1)
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--lr", type=float, default=1e-5)
    args = ap.parse_args()
    torch.manual_seed(args.fold)
    device = torch.device("cuda")
    train_ds = EmotionClips(args.fold, "train")
    train_dl = DataLoader(train_ds, 8, shuffle=True, collate_fn=pad_wavs, num_workers=4)
    valid_dl = DataLoader(EmotionClips(args.fold, "valid"), 16, collate_fn=pad_wavs)
    net = EmotionNet().to(device)
    opt = torch.optim.AdamW([
        {"params": [p for p in net.w2v.parameters() if p.requires_grad], "lr": args.lr},
        {"params": net.head.parameters(), "lr": 1e-3},
    ])
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max", factor=0.5, patience=2)
    best = 0.0
    for epoch in range(args.epochs):
        loss = train_epoch(net, train_dl, opt, device, train_ds.class_weight().to(device))
        ua = unweighted_recall(net, valid_dl, device)
        sched.step(ua)
        print(f"epoch {epoch} loss {loss:.4f} UAR {ua:.4f}")
        if ua > best:
            best = ua
            torch.save(net.state_dict(), f"emotion_fold{args.fold}.pt")


if __name__ == "__main__":
    main()
