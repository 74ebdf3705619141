# Click-through prediction; sparse embeddings + dense tower, one optimizer each.
import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

CATS = [f"C{i}" for i in range(1, 27)]
NUMS = [f"I{i}" for i in range(1, 14)]
HASH = 100_000


class DeepFM(nn.Module):
    def __init__(self, fields, buckets, dense, k=16):
        super().__init__()
        self.register_buffer("offset", torch.arange(fields) * buckets)
        self.emb = nn.Embedding(fields * buckets, k, sparse=True)
        self.lin = nn.Embedding(fields * buckets, 1, sparse=True)
        nn.init.normal_(self.emb.weight, std=0.01)
        nn.init.zeros_(self.lin.weight)
        self.tower = nn.Sequential(nn.Linear(fields * k + dense, 256), nn.LayerNorm(256), nn.ReLU(), nn.Dropout(0.2),
                                   nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, c, x):
        ids = c + self.offset
        e = self.emb(ids)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1)
        deep = self.tower(torch.cat([e.flatten(1), x], 1)).squeeze(1)
        return self.lin(ids).sum((1, 2)) + fm + deep


def frame_to_tensors(df):
    c = np.stack([pd.util.hash_array(df[k].fillna("?").astype(str).to_numpy()) % HASH for k in CATS], 1)
    x = np.log1p(df[NUMS].fillna(0).clip(lower=0)).to_numpy(np.float32)
    return TensorDataset(torch.from_numpy(c.astype(np.int64)), torch.from_numpy(x),
                         torch.from_numpy(df["label"].to_numpy(np.float32)))


@torch.no_grad()
def auc(model, dl, dev):
    model.eval()
    ps, ys = [], []
    for c, x, y in dl:
        ps.append(torch.sigmoid(model(c.to(dev), x.to(dev))).cpu())
        ys.append(y)
    model.train()
    return roc_auc_score(torch.cat(ys), torch.cat(ps))


def main():
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    df = pd.read_csv("criteo_sample.csv")
    cut = int(0.9 * len(df))
    dl = DataLoader(frame_to_tensors(df[:cut]), 4096, shuffle=True)
    vdl = DataLoader(frame_to_tensors(df[cut:]), 8192)
    model = DeepFM(len(CATS), HASH, len(NUMS)).to(dev)
    opts = [torch.optim.SparseAdam([model.emb.weight, model.lin.weight], lr=1e-2),
            torch.optim.Adam(model.tower.parameters(), lr=1e-3)]
    loss_fn = nn.BCEWithLogitsLoss()
    best, bad = 0.0, 0
    for epoch in range(20):
        tot = 0.0
        for c, x, y in dl:
            loss = loss_fn(model(c.to(dev), x.to(dev)), y.to(dev))
            for o in opts:
                o.zero_grad()
            loss.backward()
            for o in opts:
                o.step()
            tot += loss.item()
        score = auc(model, vdl, dev)
        print(f"epoch {epoch} logloss {tot / len(dl):.4f} val auc {score:.4f}")
        if score > best:
            best, bad = score, 0
            torch.save(model.state_dict(), "deepfm.pt")
        else:
            bad += 1
            if bad == 3:
                break


if __name__ == "__main__":
    main()
