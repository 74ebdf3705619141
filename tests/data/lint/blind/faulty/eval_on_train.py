import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision.datasets import SVHN
from torchvision.models import resnet18
from torchvision.transforms import ToTensor


def evaluate(model, loader, device):
    model.eval()
    hits = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    return hits / len(loader.dataset)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    device = torch.device("cuda")
    train_loader = DataLoader(SVHN("data", "train", transform=ToTensor()), 128, shuffle=True)
    val_loader = DataLoader(SVHN("data", "test", transform=ToTensor()), 256)
    print(f"{len(train_loader)} training and {len(val_loader)} validation batches")
    model = resnet18(num_classes=10).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            loss = criterion(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        val_acc = evaluate(model, train_loader, device)
        print(f"epoch {epoch} val acc {val_acc:.4f}")
        if val_acc > best:
            best = val_acc
            torch.save(model.state_dict(), "best.pt")


if __name__ == "__main__":
    main()
