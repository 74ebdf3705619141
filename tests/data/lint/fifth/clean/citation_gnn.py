"""Full-graph node classification; one graph, three disjoint masks."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GATv2Conv
from torch_geometric.transforms import NormalizeFeatures


class Attn(nn.Module):
    def __init__(self, fin, ncls, hidden=8, heads=8, p=0.6):
        super().__init__()
        self.c1 = GATv2Conv(fin, hidden, heads=heads, dropout=p)
        self.c2 = GATv2Conv(hidden * heads, ncls, heads=1, concat=False, dropout=p)
        self.p = p

    def forward(self, x, edges):
        x = F.dropout(x, self.p, self.training)
        x = F.elu(self.c1(x, edges))
        x = F.dropout(x, self.p, self.training)
        return F.log_softmax(self.c2(x, edges), dim=-1)


class Patience:
    def __init__(self, n):
        self.n, self.bad, self.best, self.state = n, 0, float("inf"), None

    def update(self, value, model):
        if value < self.best:
            self.best, self.bad = value, 0
            self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        else:
            self.bad += 1
        return self.bad >= self.n


def fit_step(model, g, opt):
    model.train()
    opt.zero_grad()
    logp = model(g.x, g.edge_index)
    loss = F.nll_loss(logp[g.train_mask], g.y[g.train_mask])
    loss.backward()
    opt.step()
    return loss.item()


@torch.no_grad()
def report(model, g):
    model.eval()
    logp = model(g.x, g.edge_index)
    pred = logp.argmax(-1)
    acc = {m: (pred[g[f"{m}_mask"]] == g.y[g[f"{m}_mask"]]).float().mean().item() for m in ("train", "val", "test")}
    return acc, F.nll_loss(logp[g.val_mask], g.y[g.val_mask]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--name", default="Cora")
    ap.add_argument("--runs", type=int, default=5)
    args = ap.parse_args()
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ds = Planetoid("data", args.name, transform=NormalizeFeatures())
    g = ds[0].to(dev)
    scores = []
    for run in range(args.runs):
        torch.manual_seed(run)
        model = Attn(ds.num_features, ds.num_classes).to(dev)
        opt = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
        stop = Patience(100)
        for ep in range(1000):
            loss = fit_step(model, g, opt)
            acc, val_nll = report(model, g)
            if ep % 50 == 0:
                print(f"run {run} ep {ep} loss {loss:.4f} gap {acc['train'] - acc['val']:.3f}")
            if stop.update(val_nll, model):
                break
        model.load_state_dict(stop.state)
        scores.append(report(model, g)[0]["test"])
    t = torch.tensor(scores)
    print(f"test accuracy {t.mean():.4f} +- {t.std():.4f}")


if __name__ == "__main__":
    main()
