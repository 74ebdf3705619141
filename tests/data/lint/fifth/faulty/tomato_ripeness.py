"""Ripeness grade + firmness from greenhouse photos, two heads."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from greenhouse import TomatoSet


class TwoHeads(nn.Module):
    def __init__(self, grades=6):
        super().__init__()
        self.back = resnet18(weights="IMAGENET1K_V1")
        d = self.back.fc.in_features
        self.back.fc = nn.Identity()
        self.grade, self.firm = nn.Linear(d, grades), nn.Linear(d, 1)

    def forward(self, x):
        h = self.back(x)
        return self.grade(h), self.firm(h).squeeze(1)


class Objective:
    weights = {"grade": 1.0, "firm": 0.3}

    def __call__(self, out, batch):
        g, f = out
        parts = {"grade": F.cross_entropy(g, batch["grade"]), "firm": F.smooth_l1_loss(f, batch["firm"])}
        total = sum(self.weights[k] * v for k, v in parts.items())
        return total, parts


def to_dev(b, dev):
    return {k: v.to(dev) for k, v in b.items()}


def fit_batch(model, opt, obj, batch):
    total, parts = obj(model(batch["image"]), batch)
    opt.zero_grad()
    loss = total.detach().requires_grad_()
    loss.backward()
    opt.step()
    return {k: v.item() for k, v in parts.items()}


def test(model, loader, dev):
    model.eval()
    hit, mae, n = 0, 0.0, 0
    with torch.no_grad():
        for b in loader:
            b = to_dev(b, dev)
            g, f = model(b["image"])
            hit += (g.argmax(1) == b["grade"]).sum().item()
            mae += (f - b["firm"]).abs().sum().item()
            n += len(f)
    return hit / n, mae / n


def main():
    dev = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    tr = DataLoader(TomatoSet("train"), 64, shuffle=True, num_workers=4, drop_last=True)
    te = DataLoader(TomatoSet("test"), 128, num_workers=4)
    model = TwoHeads().to(dev)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 15, 0.1)
    obj = Objective()
    for ep in range(40):
        model.train()
        sums = {}
        for b in tr:
            for k, v in fit_batch(model, opt, obj, to_dev(b, dev)).items():
                sums[k] = sums.get(k, 0.0) + v / len(tr)
        sched.step()
        acc, mae = test(model, te, dev)
        print(ep, {k: round(v, 4) for k, v in sums.items()}, f"acc {acc:.3f} firmness MAE {mae:.3f}")
    torch.save(model.state_dict(), "tomato.pt")


if __name__ == "__main__":
    main()
