import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from tts_data import PhonemeDurations, pad_phonemes


class DurationPredictor(nn.Module):
    def __init__(self, phones=80, d=192):
        super().__init__()
        self.emb = nn.Embedding(phones, d, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(d, d, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.proj = nn.Linear(d, 1)

    def forward(self, ph):
        h = self.emb(ph)
        for c, n in zip(self.convs, self.norms):
            h = n(h + torch.relu(c(h.transpose(1, 2)).transpose(1, 2)))
            h = nn.functional.dropout(h, 0.1, self.training)
        return self.proj(h).squeeze(-1)


def masked_mse(pred, dur, mask):
    err = (pred - torch.log1p(dur.float())).pow(2) * mask
    return err.sum() / mask.sum()


def backprop(loss, params, optimizer, max_norm):
    optimizer.zero_grad()
    norm = nn.utils.clip_grad_norm_(params, max_norm)
    loss.backward()
    optimizer.step()
    return float(norm)


def validate(net, loader, device):
    net.eval()
    s, n = 0.0, 0
    with torch.no_grad():
        for ph, dur in loader:
            ph, dur = ph.to(device), dur.to(device)
            s += masked_mse(net(ph), dur, ph > 0).item() * len(ph)
            n += len(ph)
    return s / n


def main(cfg):
    torch.manual_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = DurationPredictor().to(device)
    params = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.Adam(params, lr=cfg.lr, betas=(0.9, 0.98), eps=1e-9)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)
    train = DataLoader(PhonemeDurations(cfg.root / "train.txt"), 32, shuffle=True, collate_fn=pad_phonemes)
    valid = DataLoader(PhonemeDurations(cfg.root / "valid.txt"), 64, collate_fn=pad_phonemes)
    for epoch in range(cfg.epochs):
        net.train()
        for ph, dur in train:
            ph, dur = ph.to(device), dur.to(device)
            backprop(masked_mse(net(ph), dur, ph > 0), params, opt, cfg.max_norm)
        sched.step()
        print(f"epoch {epoch} valid mse {validate(net, valid, device):.5f}")
    torch.save(net.state_dict(), cfg.root / "duration.pt")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", type=Path, default=Path("ljspeech"))
    ap.add_argument("--lr", type=float, default=5e-4)
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--max_norm", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=17)
    main(ap.parse_args())
