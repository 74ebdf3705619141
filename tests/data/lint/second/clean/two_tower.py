import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from retail import SessionPairs, load_catalog


class Tower(nn.Module):
    def __init__(self, n, extra, dim=64):
        super().__init__()
        self.emb = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim + extra, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, dim))

    def forward(self, ids, feats):
        return F.normalize(self.mlp(torch.cat([self.emb(ids), feats], dim=-1)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, n_users, n_items):
        super().__init__()
        self.user = Tower(n_users, 8)
        self.item = Tower(n_items, 16)
        self.log_temp = nn.Parameter(torch.tensor(2.65))

    def forward(self, b):
        u = self.user(b["user"], b["user_feats"])
        i = self.item(b["item"], b["item_feats"])
        return u @ i.t() * self.log_temp.exp().clamp(max=100.0)


def in_batch_softmax(scores, log_pop):
    """Sampled softmax with the popularity correction; diagonal entries are the positives."""
    target = torch.arange(scores.size(0), device=scores.device)
    return F.cross_entropy(scores - log_pop.unsqueeze(0), target)


class Engine:
    def __init__(self, model, lr):
        emb = [p for n, p in model.named_parameters() if "emb" in n]
        rest = [p for n, p in model.named_parameters() if "emb" not in n and "log_temp" not in n]
        self.model = model
        self.opt = torch.optim.AdamW([
            {"params": emb, "lr": 1e-2, "weight_decay": 0.0},
            {"params": rest, "lr": lr},
            {"params": [model.log_temp], "lr": lr, "weight_decay": 0.0},
        ])
        self.plateau = ReduceLROnPlateau(self.opt, mode="max", factor=0.5, patience=2)

    def update(self, batch):
        self.opt.zero_grad(set_to_none=True)
        loss = in_batch_softmax(self.model(batch), batch["log_pop"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.opt.step()
        return loss.detach()

    @torch.no_grad()
    def recall(self, loader, catalog, k=50):
        self.model.eval()
        items = self.model.item(catalog["item"], catalog["item_feats"])
        hit, n = 0, 0
        for b in loader:
            u = self.model.user(b["user"], b["user_feats"])
            top = (u @ items.t()).topk(k, dim=-1).indices
            hit += (top == b["item"].unsqueeze(1)).any(1).sum().item()
            n += len(u)
        self.model.train()
        return hit / n


def main():
    torch.manual_seed(11)
    catalog = load_catalog()
    train_dl = DataLoader(SessionPairs("2023-01..2023-10"), 2048, shuffle=True, drop_last=True)
    valid_dl = DataLoader(SessionPairs("2023-11"), 2048)
    engine = Engine(TwoTower(500_000, 80_000), lr=1e-3)
    for epoch in range(30):
        mean = torch.zeros(())
        for batch in train_dl:
            mean += engine.update(batch)
        r = engine.recall(valid_dl, catalog)
        engine.plateau.step(r)
        print(f"[{epoch}] loss {mean.item() / len(train_dl):.4f} recall@50 {r:.4f}")


if __name__ == "__main__":
    main()
