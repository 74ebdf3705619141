import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
import torchvision.transforms as T
from torch.utils.data import DataLoader


class TwoViews:
    def __init__(self, tf):
        self.tf = tf

    def __call__(self, x):
        return self.tf(x), self.tf(x)


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        net = torchvision.models.resnet18()
        width = net.fc.in_features
        net.fc = nn.Identity()
        self.backbone = net
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self, x):
        return F.normalize(self.head(self.backbone(x)), dim=1)


def info_nce(z1, z2, tau):
    z = torch.cat([z1, z2])
    n = z1.size(0)
    sim = z @ z.t() / tau
    sim.fill_diagonal_(float("-inf"))
    target = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(sim, target)


@torch.no_grad()
def knn_accuracy(model, bank_dl, test_dl, device, k=20):
    was_training = model.training
    model.eval()
    feats, labels = [], []
    for x, y in bank_dl:
        feats.append(F.normalize(model.backbone(x.to(device)), dim=1))
        labels.append(y.to(device))
    feats, labels = torch.cat(feats), torch.cat(labels)
    good = n = 0
    for x, y in test_dl:
        q = F.normalize(model.backbone(x.to(device)), dim=1)
        idx = (q @ feats.t()).topk(k, dim=1).indices
        good += (labels[idx].mode(dim=1).values == y.to(device)).sum().item()
        n += len(y)
    model.train(was_training)
    return good / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--bs", type=int, default=512)
    ap.add_argument("--tau", type=float, default=0.5)
    args = ap.parse_args()
    device = torch.device("cuda")
    aug = TwoViews(T.Compose([T.RandomResizedCrop(32, (0.2, 1.0)), T.RandomHorizontalFlip(),
                              T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8), T.RandomGrayscale(0.2), T.ToTensor()]))
    C = torchvision.datasets.CIFAR10
    dl = DataLoader(C("data", True, download=True, transform=aug), args.bs, shuffle=True, num_workers=8, drop_last=True)
    bank = DataLoader(C("data", True, transform=T.ToTensor()), 1000, num_workers=4)
    test = DataLoader(C("data", False, transform=T.ToTensor()), 1000, num_workers=4)

    model = SimCLR().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.06 * args.bs / 256, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    scaler = torch.cuda.amp.GradScaler()
    model.train()
    for epoch in range(args.epochs):
        tot = torch.zeros((), device=device)
        for (a, b), _ in dl:
            a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
            with torch.cuda.amp.autocast():
                z1, z2 = model(a), model(b)
            loss = info_nce(z1.float(), z2.float(), args.tau)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            tot += loss.detach()
        sched.step()
        print(f"epoch {epoch} loss {tot.item() / len(dl):.4f}")
        if (epoch + 1) % 10 == 0:
            print(f"  knn acc {knn_accuracy(model, bank, test, device):.4f}")
    torch.save(model.backbone.state_dict(), "simclr_r18.pt")


if __name__ == "__main__":
    main()
