import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import Food101


class FoodNet(nn.Module):
    def __init__(self, n=101, p=0.3):
        super().__init__()
        w = models.ConvNeXt_Tiny_Weights.DEFAULT
        base = models.convnext_tiny(weights=w)
        self.tf = w.transforms()
        self.features, self.pool = base.features, base.avgpool
        self.norm = nn.LayerNorm(768)
        self.drop = nn.Dropout(p)
        self.fc = nn.Linear(768, n)

    def forward(self, x):
        h = self.pool(self.features(x)).flatten(1)
        return F.softmax(self.fc(self.drop(self.norm(h))), dim=1)


def train_one(model, dl, opt, criterion, dev):
    model.train()
    tot = hit = n = 0
    for x, y in dl:
        x, y = x.to(dev), y.to(dev)
        out = model(x)
        loss = criterion(out, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        tot += loss.item() * len(y)
        hit += (out.argmax(1) == y).sum().item()
        n += len(y)
    return tot / n, hit / n


@torch.inference_mode()
def test(model, dl, dev):
    model.eval()
    top1 = top5 = n = 0
    for x, y in dl:
        idx = model(x.to(dev)).topk(5, 1).indices.cpu()
        top1 += (idx[:, 0] == y).sum().item()
        top5 += (idx == y[:, None]).any(1).sum().item()
        n += len(y)
    return top1 / n, top5 / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--bs", type=int, default=64)
    a = ap.parse_args()
    torch.manual_seed(0)
    dev = torch.device("cuda")
    model = FoodNet().to(dev)
    tr = DataLoader(Food101("data", "train", transform=model.tf, download=True), a.bs, shuffle=True, num_workers=8)
    te = DataLoader(Food101("data", "test", transform=model.tf, download=True), 2 * a.bs, num_workers=8)
    head = [*model.norm.parameters(), *model.fc.parameters()]
    opt = torch.optim.Adam([{"params": model.features.parameters(), "lr": a.lr / 10}, {"params": head}], lr=a.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for e in range(a.epochs):
        loss, acc = train_one(model, tr, opt, criterion, dev)
        sched.step()
        t1, t5 = test(model, te, dev)
        print(f"{e} loss {loss:.4f} acc {acc:.4f} | test top1 {t1:.4f} top5 {t5:.4f}")
        torch.save(model.state_dict(), "food.pt")


if __name__ == "__main__":
    main()
