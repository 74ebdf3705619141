import argparse

import torch
import torch.nn as nn
from sklearn.metrics import average_precision_score
from torch.utils.data import DataLoader

from fsd50k import FSD50K
from backbones import Cnn14Logits


def build(ckpt):
    net = Cnn14Logits(classes_num=527)
    net.load_state_dict(torch.load(ckpt, map_location="cpu")["model"])
    for p in net.conv_block1.parameters():
        p.requires_grad = False
    return net


class Finetuner:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.net = build(args.ckpt).to(self.device)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.net.parameters() if p.requires_grad], lr=args.lr, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.epochs)
        self.net.fc_audioset = nn.Linear(2048, 200).to(self.device)
        self.criterion = nn.BCEWithLogitsLoss()
        self.train_dl = DataLoader(FSD50K("train"), 32, shuffle=True, num_workers=8)
        self.val_dl = DataLoader(FSD50K("val"), 64, num_workers=8)

    def train_epoch(self):
        self.net.train()
        loss_sum = 0.0
        for wav, tags in self.train_dl:
            logits = self.net(wav.to(self.device))
            loss = self.criterion(logits, tags.float().to(self.device))
            self.net.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 2.0)
            self.optimizer.step()
            loss_sum += loss.item()
        self.scheduler.step()
        return loss_sum / len(self.train_dl)

    @torch.no_grad()
    def mean_ap(self):
        self.net.eval()
        p, y = [], []
        for wav, tags in self.val_dl:
            p.append(torch.sigmoid(self.net(wav.to(self.device))).cpu())
            y.append(tags)
        return average_precision_score(torch.cat(y).numpy(), torch.cat(p).numpy(), average="macro")

    def run(self):
        best = 0.0
        for epoch in range(self.args.epochs):
            loss, m = self.train_epoch(), self.mean_ap()
            print(f"epoch {epoch} loss {loss:.4f} mAP {m:.4f}")
            if m > best:
                best = m
                torch.save(self.net.state_dict(), self.args.out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", default="Cnn14_mAP=0.431.pth")
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--out", default="fsd_cnn14.pt")
    torch.manual_seed(55)
    Finetuner(ap.parse_args()).run()
