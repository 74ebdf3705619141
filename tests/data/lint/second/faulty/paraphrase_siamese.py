import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from stsb import STSPairs


class Siamese(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.lm = AutoModel.from_pretrained(name)

    def forward(self, enc):
        h = self.lm(**enc).last_hidden_state
        m = enc["attention_mask"].unsqueeze(-1)
        return (h * m).sum(1) / m.sum(1)


class PairTrainer:
    def __init__(self, name, lr, device):
        self.tok = AutoTokenizer.from_pretrained(name)
        self.net = Siamese(name).to(device)
        self.device = device
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=lr)

    def embed(self, sents):
        enc = self.tok(list(sents), padding=True, truncation=True, max_length=128, return_tensors="pt")
        return self.net(enc.to(self.device))

    def similarity(self, a, b):
        return F.cosine_similarity(self.embed(a), self.embed(b))

    def train_epoch(self, loader):
        self.net.train()
        s = 0.0
        for a, b, gold in loader:
            loss = F.mse_loss(self.similarity(a, b), gold.float().to(self.device) / 5.0)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.opt.step()
            s += loss.item()
        return s / len(loader)

    @torch.no_grad()
    def evaluate(self, loader):
        pred, gold = [], []
        for a, b, g in loader:
            pred.extend(self.similarity(a, b).cpu().tolist())
            gold.extend(g.tolist())
        return spearmanr(pred, gold)[0]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", default="distilroberta-base")
    ap.add_argument("--lr", type=float, default=2e-5)
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    torch.manual_seed(9)
    t = PairTrainer(args.name, args.lr, "cuda" if torch.cuda.is_available() else "cpu")
    train_dl = DataLoader(STSPairs("train"), 16, shuffle=True)
    dev_dl = DataLoader(STSPairs("dev"), 64)
    best = -1.0
    for epoch in range(args.epochs):
        loss = t.train_epoch(train_dl)
        rho = t.evaluate(dev_dl)
        print(f"epoch {epoch} loss {loss:.4f} dev spearman {rho:.4f}")
        if rho > best:
            best = rho
            torch.save(t.net.state_dict(), "siamese.pt")


if __name__ == "__main__":
    main()
