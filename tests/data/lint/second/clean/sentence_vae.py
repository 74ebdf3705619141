import argparse
from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from ptb import PTB


class SentenceVAE(nn.Module):
    def __init__(self, vocab, emb=300, hid=256, z=16, word_drop=0.5, unk=1):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb, padding_idx=0)
        self.enc = nn.GRU(emb, hid, batch_first=True)
        self.dec = nn.GRU(emb, hid, batch_first=True)
        self.mu, self.logvar = nn.Linear(hid, z), nn.Linear(hid, z)
        self.z2h = nn.Linear(z, hid)
        self.out = nn.Linear(hid, vocab)
        self.word_drop, self.unk = word_drop, unk

    def forward(self, inp):
        _, h = self.enc(self.emb(inp))
        mu, logvar = self.mu(h[-1]), self.logvar(h[-1])
        z = mu
        if self.training:
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            drop = torch.rand(inp.shape, device=inp.device) < self.word_drop
            inp = inp.masked_fill(drop & (inp > 2), self.unk)
        o, _ = self.dec(self.emb(inp), torch.tanh(self.z2h(z)).unsqueeze(0))
        return F.log_softmax(self.out(o), dim=-1), mu, logvar


NLL = nn.NLLLoss(ignore_index=0, reduction="sum")


def elbo(logp, target, mu, logvar):
    rec = NLL(logp.flatten(0, 1), target.flatten())
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return rec, kl


def kl_weight(step, k=0.0025, x0=2500):
    return float(1 / (1 + torch.exp(torch.tensor(-k * (step - x0)))))


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    sets = {s: PTB(s) for s in ("train", "valid", "test")}
    model = SentenceVAE(sets["train"].vocab_size).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step = 0
    for epoch in range(args.epochs):
        for split in ("train", "valid", "test"):
            loader = DataLoader(sets[split], args.batch_size, shuffle=split == "train")
            tracker = defaultdict(float)
            model.train(split == "train")
            with torch.set_grad_enabled(split == "train"):
                for batch in loader:
                    inp, target = batch["input"].to(device), batch["target"].to(device)
                    logp, mu, logvar = model(inp)
                    rec, kl = elbo(logp, target, mu, logvar)
                    loss = (rec + kl_weight(step) * kl) / inp.size(0)
                    if split == "train":
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        step += 1
                    tracker["rec"] += rec.item()
                    tracker["kl"] += kl.item()
                    tracker["n"] += inp.size(0)
            n = tracker["n"]
            print(f"{split:5s} {epoch:02d} elbo {(tracker['rec'] + tracker['kl']) / n:.3f} kl {tracker['kl'] / n:.3f}")
        torch.save(model.state_dict(), f"svae_{epoch}.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda")
    main(p.parse_args())
