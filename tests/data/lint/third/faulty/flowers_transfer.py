import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import Flowers102


def get_loaders(root, tf, bs):
    mk = lambda split: Flowers102(root, split=split, transform=tf, download=True)
    return (DataLoader(mk("train"), bs, shuffle=True, num_workers=4),
            DataLoader(mk("val"), bs, num_workers=4))


def build_model(args, device):
    weights = models.ResNet50_Weights.IMAGENET1K_V2
    model = models.resnet50(weights=weights)
    for p in model.parameters():
        p.requires_grad = False
    optimizer = optim.Adam(model.fc.parameters(), lr=args.lr)
    model.fc = nn.Sequential(nn.Dropout(0.4), nn.Linear(model.fc.in_features, 102))
    return model.to(device), optimizer, weights.transforms()


def train(model, loader, criterion, optimizer, device):
    model.train()
    running, correct = 0.0, 0
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running += loss.item() * inputs.size(0)
        correct += (outputs.argmax(1) == labels).sum().item()
    n = len(loader.dataset)
    return running / n, correct / n


def evaluate(model, loader, criterion, device):
    model.eval()
    running, correct = 0.0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            running += criterion(outputs, labels).item() * inputs.size(0)
            correct += (outputs.argmax(1) == labels).sum().item()
    n = len(loader.dataset)
    return running / n, correct / n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bs", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer, tf = build_model(args, device)
    train_loader, val_loader = get_loaders(args.root, tf, args.bs)
    criterion = nn.CrossEntropyLoss()
    scheduler = optim.lr_scheduler.StepLR(optimizer, 7, 0.1)
    best = 0.0
    for epoch in range(args.epochs):
        tl, ta = train(model, train_loader, criterion, optimizer, device)
        vl, va = evaluate(model, val_loader, criterion, device)
        scheduler.step()
        print(f"Epoch {epoch}: train {tl:.4f}/{ta:.4f} val {vl:.4f}/{va:.4f}")
        if va > best:
            best = va
            torch.save(model.state_dict(), "flowers.pth")


if __name__ == "__main__":
    main()
