"""Contrastive pre-training on unlabelled STL-10."""
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms as T


class TwoViews:
    def __init__(self, tf):
        self.tf = tf

    def __call__(self, img):
        return self.tf(img), self.tf(img)


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.enc = torchvision.models.resnet18()
        d = self.enc.fc.in_features
        self.enc.fc = nn.Identity()
        self.proj = nn.Sequential(nn.Linear(d, d), nn.ReLU(inplace=True), nn.Linear(d, dim))

    def forward(self, x):
        return self.proj(self.enc(x))


def nt_xent(z1, z2, tau):
    z = F.normalize(torch.cat([z1, z2]).float(), dim=1)
    sim = z @ z.t() / tau
    sim.fill_diagonal_(-1e9)
    n = z1.size(0)
    labels = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, labels), (sim.argmax(1) == labels).float().mean()


def lr_at(step, total, warm, peak):
    if step < warm:
        return peak * (step + 1) / warm
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--tau", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=0.6)
    ap.add_argument("--wd", type=float, default=1e-4)
    args = ap.parse_args()
    tf = T.Compose([T.RandomResizedCrop(96, (0.2, 1.0)), T.RandomHorizontalFlip(),
                    T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8), T.RandomGrayscale(0.2),
                    T.GaussianBlur(9), T.ToTensor()])
    ds = torchvision.datasets.STL10("data", split="unlabeled", transform=TwoViews(tf), download=True)
    dl = DataLoader(ds, args.batch, shuffle=True, drop_last=True, num_workers=8, pin_memory=True)
    model = SimCLR().cuda()
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
    opt = torch.optim.SGD([{"params": decay, "weight_decay": args.wd}, {"params": plain, "weight_decay": 0}],
                          lr=args.lr, momentum=0.9)
    scaler = torch.cuda.amp.GradScaler()
    total, warm = args.epochs * len(dl), 10 * len(dl)
    step = 0
    for epoch in range(args.epochs):
        sum_loss = sum_acc = 0.0
        for (a, b), _ in dl:
            for g in opt.param_groups:
                g["lr"] = lr_at(step, total, warm, args.lr)
            a, b = a.cuda(non_blocking=True), b.cuda(non_blocking=True)
            with torch.cuda.amp.autocast():
                z1, z2 = model(torch.cat([a, b])).chunk(2)
            loss, acc = nt_xent(z1, z2, args.tau)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            sum_loss += loss.detach()
            sum_acc += acc
            step += 1
        print(f"{epoch}: loss {sum_loss.item() / len(dl):.4f} top1 {sum_acc.item() / len(dl):.3f}")
        if (epoch + 1) % 20 == 0:
            torch.save(model.enc.state_dict(), f"simclr_{epoch + 1}.pt")


if __name__ == "__main__":
    main()
