import argparse
import os

import pandas as pd
import timm
import torch
import torch.nn as nn
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

MEAN, STD = (0.43, 0.49, 0.31), (0.22, 0.22, 0.21)


class Cassava(Dataset):
    def __init__(self, frame, folder, train):
        self.rows = frame.reset_index(drop=True)
        self.folder = folder
        pre = [T.RandomResizedCrop(288, (0.5, 1.0)), T.RandomVerticalFlip(), T.RandomHorizontalFlip()] if train \
            else [T.Resize(320), T.CenterCrop(288)]
        self.t = T.Compose(pre + [T.ToTensor(), T.Normalize(MEAN, STD)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        r = self.rows.loc[i]
        return self.t(Image.open(os.path.join(self.folder, r.image_id)).convert("RGB")), int(r.label)


def mix(x, y, n, alpha=0.4):
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    perm = torch.randperm(x.size(0), device=x.device)
    hot = nn.functional.one_hot(y, n).float()
    return lam * x + (1 - lam) * x[perm], lam * hot + (1 - lam) * hot[perm]


def train_one(model, loader, crit, opt, sched, device, n):
    model.train()
    run = 0.0
    for x, y in loader:
        x, y = mix(x.to(device), y.to(device), n)
        opt.zero_grad()
        loss = crit(model(x), y)
        loss.backward()
        sched.step()
        opt.step()
        run += loss.item()
    return run / len(loader)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    ok = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
    return ok / len(loader.dataset)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--csv", default="train.csv")
    ap.add_argument("--images", default="train_images")
    ap.add_argument("--fold", type=int, default=0)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--max-lr", type=float, default=1e-3)
    a = ap.parse_args()
    device = torch.device("cuda")
    df = pd.read_csv(a.csv)
    tr = DataLoader(Cassava(df[df.fold != a.fold], a.images, True), 32, shuffle=True, num_workers=8, drop_last=True)
    va = DataLoader(Cassava(df[df.fold == a.fold], a.images, False), 64, num_workers=8)
    model = timm.create_model("tf_efficientnet_b3_ns", pretrained=True, num_classes=5).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=a.max_lr / 25, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, a.max_lr, epochs=a.epochs, steps_per_epoch=len(tr))
    crit = nn.CrossEntropyLoss()
    best = 0.0
    for e in range(a.epochs):
        loss = train_one(model, tr, crit, opt, sched, device, 5)
        acc = accuracy(model, va, device)
        print(f"fold {a.fold} epoch {e} loss {loss:.4f} acc {acc:.4f}")
        if acc > best:
            best = acc
            torch.save(model.state_dict(), f"fold{a.fold}.pt")


if __name__ == "__main__":
    main()
