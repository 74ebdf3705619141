"""Fine-tune an ImageNet backbone on pollen and microfossil slides."""
import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms as T


def loaders(root, bs):
    tf = {
        "train": T.Compose([T.RandomResizedCrop(224, (0.6, 1)), T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.ToTensor()]),
        "val": T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()]),
    }
    sets = {k: datasets.ImageFolder(f"{root}/{k}", t) for k, t in tf.items()}
    dls = {k: DataLoader(s, bs, shuffle=k == "train", num_workers=6, drop_last=k == "train") for k, s in sets.items()}
    return dls, sets["train"].classes


def backbone(name):
    net = getattr(models, name)(weights="DEFAULT")
    for p in net.layer1.parameters():
        p.requires_grad = False
    return net


class FineTuner:
    def __init__(self, args, n_classes):
        self.dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = backbone(args.arch).to(self.dev)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.opt = torch.optim.SGD(trainable, lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.model.fc = nn.Linear(self.model.fc.in_features, n_classes).to(self.dev)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, args.epochs)
        self.crit = nn.CrossEntropyLoss(label_smoothing=0.1)

    def train_epoch(self, dl):
        self.model.train()
        total = 0.0
        for x, y in dl:
            x, y = x.to(self.dev), y.to(self.dev)
            self.opt.zero_grad()
            loss = self.crit(self.model(x), y)
            loss.backward()
            self.opt.step()
            total += loss.item()
        self.sched.step()
        return total / len(dl)

    @torch.no_grad()
    def accuracy(self, dl):
        self.model.eval()
        right = n = 0
        for x, y in dl:
            right += (self.model(x.to(self.dev)).argmax(1).cpu() == y).sum().item()
            n += len(y)
        return right / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--arch", default="resnet34")
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--bs", type=int, default=48)
    p.add_argument("--lr", type=float, default=0.01)
    args = p.parse_args()
    torch.manual_seed(77)
    dls, classes = loaders(args.root, args.bs)
    ft = FineTuner(args, len(classes))
    best = 0.0
    for ep in range(args.epochs):
        loss = ft.train_epoch(dls["train"])
        acc = ft.accuracy(dls["val"])
        print(f"{ep} loss {loss:.4f} val acc {acc:.4f}")
        if acc > best:
            best = acc
            torch.save({"model": ft.model.state_dict(), "classes": classes}, "fossils.pt")


if __name__ == "__main__":
    main()
