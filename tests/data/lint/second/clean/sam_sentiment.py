import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from reviews import Reviews, pad


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_cls, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base_cls(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self):
        grads = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        scale = self.defaults["rho"] / (torch.stack(grads).norm() + 1e-12)
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    e = p.grad * scale
                    p.add_(e)
                    self.state[p]["e"] = e
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for g in self.param_groups:
            for p in g["params"]:
                if "e" in self.state[p]:
                    p.sub_(self.state[p].pop("e"))
        self.base.step()
        self.zero_grad()


class TextCNN(nn.Module):
    def __init__(self, vocab, classes=5, d=100):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(d, 100, k) for k in (3, 4, 5))
        self.fc = nn.Linear(300, classes)

    def forward(self, x):
        e = self.emb(x).transpose(1, 2)
        h = torch.cat([F.relu(c(e)).amax(-1) for c in self.convs], 1)
        return self.fc(F.dropout(h, 0.5, self.training))


def smooth_ce(logits, y, eps=0.1):
    logp = F.log_softmax(logits, dim=-1)
    nll = -logp.gather(1, y[:, None]).squeeze(1)
    return ((1 - eps) * nll - eps * logp.mean(-1)).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()
    torch.manual_seed(4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tr, va = Reviews("train"), Reviews("valid")
    train_loader = DataLoader(tr, 64, shuffle=True, collate_fn=pad)
    valid_loader = DataLoader(va, 256, collate_fn=pad)
    model = TextCNN(tr.vocab_size).to(device)
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=args.rho, lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.base, args.epochs)

    for epoch in range(args.epochs):
        model.train()
        log = []
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = smooth_ce(model(x), y)
            loss.backward()
            optimizer.ascend()
            smooth_ce(model(x), y).backward()
            optimizer.descend()
            log.append(loss.detach())
        scheduler.step()
        model.eval()
        with torch.inference_mode():
            good = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in valid_loader)
        print(f"{epoch} loss {torch.stack(log).mean().item():.4f} valid {good / len(va):.4f}")


if __name__ == "__main__":
    main()
