"""LightGCN-style collaborative filtering with BPR."""
import numpy as np
import scipy.sparse as sp
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast

from gowalla import load_interactions


class LightGCN(nn.Module):
    def __init__(self, n_users, n_items, adj, d=64, layers=3):
        super().__init__()
        self.n_users, self.layers = n_users, layers
        self.table = nn.Embedding(n_users + n_items, d)
        nn.init.normal_(self.table.weight, std=0.1)
        self.register_buffer("adj", adj)

    def propagate(self):
        e = self.table.weight
        out = [e]
        with autocast(enabled=False):
            for _ in range(self.layers):
                e = torch.sparse.mm(self.adj, e)
                out.append(e)
        e = torch.stack(out).mean(0)
        return e[:self.n_users], e[self.n_users:]

    def forward(self, u, i, j):
        U, I = self.propagate()
        return (U[u] * I[i]).sum(-1), (U[u] * I[j]).sum(-1)


def normalized_adj(pairs, n_users, n_items):
    r, c = pairs[:, 0], pairs[:, 1] + n_users
    n = n_users + n_items
    a = sp.coo_matrix((np.ones(2 * len(r)), (np.r_[r, c], np.r_[c, r])), shape=(n, n))
    d = np.power(np.maximum(np.asarray(a.sum(1)).ravel(), 1), -0.5)
    a = sp.diags(d) @ a @ sp.diags(d)
    a = a.tocoo()
    return torch.sparse_coo_tensor(np.stack([a.row, a.col]), a.data, (n, n), dtype=torch.float32).coalesce()


def recall_at(model, train_pos, test_pos, k=20):
    model.eval()
    out = []
    with torch.no_grad():
        U, I = model.propagate()
        for u, gold in test_pos.items():
            s = I @ U[u]
            s[train_pos[u]] = -1e9
            top = set(s.topk(k).indices.tolist())
            out.append(len(top & set(gold)) / min(k, len(gold)))
    model.train()
    return float(np.mean(out))


def main():
    np.random.seed(0)
    torch.manual_seed(0)
    pairs, train_pos, test_pos, n_users, n_items = load_interactions()
    device = torch.device("cuda")
    model = LightGCN(n_users, n_items, normalized_adj(pairs, n_users, n_items)).to(device)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    model.train()
    for epoch in range(1, 401):
        order = np.random.permutation(len(pairs))
        total = 0.0
        for start in range(0, len(order), 2048):
            chunk = pairs[order[start:start + 2048]]
            u, i = torch.from_numpy(chunk).long().to(device).t()
            j = torch.randint(0, n_items, u.shape, device=device)
            opt.zero_grad(set_to_none=True)
            with autocast():
                pos, neg = model(u, i, j)
                loss = F.softplus(neg - pos).mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            total += loss.item()
        if epoch % 10 == 0:
            print(f"epoch {epoch} bpr {total:.3f} recall@20 {recall_at(model, train_pos, test_pos):.4f}")


if __name__ == "__main__":
    main()
