import argparse

import torch
import torch.nn as nn
import torchvision
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from torchvision import transforms as T


def get_data(bs):
    norm = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    aug = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm])
    plain = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm])
    tr = torchvision.datasets.Flowers102("data", "train", aug, download=True)
    va = torchvision.datasets.Flowers102("data", "val", plain, download=True)
    return DataLoader(tr, bs, shuffle=True, num_workers=4), DataLoader(va, bs, num_workers=4)


def train_one_epoch(model, loader, criterion, optimizer, scaler):
    model.train()
    total = 0.0
    for images, labels in loader:
        images, labels = images.cuda(), labels.cuda()
        optimizer.zero_grad()
        with autocast():
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        total += loss.item()
    return total / len(loader)


def validate(model, loader):
    model.eval()
    correct = n = 0
    with torch.no_grad():
        for images, labels in loader:
            out = model(images.cuda())
            correct += (out.argmax(1).cpu() == labels).sum().item()
            n += labels.size(0)
    return correct / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()
    train_loader, val_loader = get_data(args.batch_size)
    model = torchvision.models.resnet50(weights="IMAGENET1K_V2")
    model.fc = nn.Linear(model.fc.in_features, 102)
    model = model.cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.1)
    scaler = GradScaler()
    best = 0.0
    for epoch in range(args.epochs):
        loss = train_one_epoch(model, train_loader, criterion, optimizer, scaler)
        acc = validate(model, val_loader)
        scheduler.step()
        print(f"[{epoch + 1}/{args.epochs}] loss={loss:.4f} val_acc={acc:.4f}")
        if acc > best:
            best = acc
            torch.save(model.state_dict(), "flowers.pth")


if __name__ == "__main__":
    main()
