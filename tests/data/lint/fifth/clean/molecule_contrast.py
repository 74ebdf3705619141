"""Contrastive pre-training of a fingerprint encoder on augmented SMILES pairs, then a linear probe."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from moldata import SmilesPairs, LabelledSmiles, pad_pairs, pad_single

dev = "cuda:0"


class SmilesEncoder(nn.Module):
    def __init__(self, vocab=72, d=256, out=128):
        super().__init__()
        self.tok = nn.Embedding(vocab, d, padding_idx=0)
        self.gru = nn.GRU(d, d, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.proj = nn.Sequential(nn.Linear(2 * d, d), nn.ReLU(), nn.Linear(d, out))

    def embed(self, ids):
        y, _ = self.gru(self.tok(ids))
        m = (ids != 0).unsqueeze(-1).float()
        return (y * m).sum(1) / m.sum(1).clamp(min=1)

    def forward(self, ids):
        return F.normalize(self.proj(self.embed(ids)), dim=-1)


def nt_xent(a, b, temp=0.1):
    z = torch.cat([a, b])
    sim = z @ z.t() / temp
    sim.fill_diagonal_(float("-inf"))
    n = a.size(0)
    pos = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, pos)


def pretrain(enc, loader, epochs):
    opt = torch.optim.AdamW(enc.parameters(), lr=3e-4, weight_decay=1e-4)
    steps = epochs * len(loader)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    enc.train()
    for ep in range(epochs):
        avg = 0.0
        for v1, v2 in loader:
            loss = nt_xent(enc(v1.to(dev)), enc(v2.to(dev)))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            avg += loss.item() / len(loader)
        print(f"[pretrain] {ep} {avg:.4f}")


@torch.no_grad()
def features(enc, loader):
    enc.eval()
    xs, ys = [], []
    for ids, y in loader:
        xs.append(enc.embed(ids.to(dev)))
        ys.append(y.to(dev))
    return torch.cat(xs), torch.cat(ys)


def probe(enc, train_loader, test_loader, iters=300):
    xtr, ytr = features(enc, train_loader)
    xte, yte = features(enc, test_loader)
    clf = nn.Linear(xtr.size(1), 1).to(dev)
    opt = torch.optim.LBFGS(clf.parameters(), max_iter=iters)

    def closure():
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(clf(xtr).squeeze(1), ytr)
        loss = loss + 1e-4 * clf.weight.pow(2).sum()
        loss.backward()
        return loss

    opt.step(closure)
    with torch.no_grad():
        acc = {}
        for name, x, y in (("train", xtr, ytr), ("test", xte, yte)):
            prob = torch.sigmoid(clf(x).squeeze(1))
            acc[name] = ((prob > 0.5).float() == y).float().mean().item()
    return acc


if __name__ == "__main__":
    torch.manual_seed(5)
    encoder = SmilesEncoder().to(dev)
    pairs = DataLoader(SmilesPairs("zinc250k.smi"), 512, shuffle=True, drop_last=True, collate_fn=pad_pairs, num_workers=8)
    pretrain(encoder, pairs, epochs=20)
    tr = DataLoader(LabelledSmiles("bbbp", "train"), 256, collate_fn=pad_single)
    te = DataLoader(LabelledSmiles("bbbp", "test"), 256, collate_fn=pad_single)
    print(probe(encoder, tr, te))
    torch.save(encoder.state_dict(), "smiles_encoder.pt")
