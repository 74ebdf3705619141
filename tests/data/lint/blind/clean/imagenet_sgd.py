import argparse
import time

import torch
import torch.nn as nn
import torchvision.transforms as T
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--batch-size", default=256, type=int)


def loaders(root, bs):
    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    tr = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm])
    va = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm])
    return (DataLoader(ImageFolder(f"{root}/train", tr), bs, shuffle=True, num_workers=8, pin_memory=True),
            DataLoader(ImageFolder(f"{root}/val", va), bs, num_workers=8, pin_memory=True))


def train(loader, model, criterion, optimizer, epoch, device):
    model.train()
    start = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 50 == 0:
            print(f"[{epoch}][{i}/{len(loader)}] loss {loss.item():.3f} t {time.time() - start:.1f}s")


def validate(loader, model, criterion, device):
    model.eval()
    loss_sum, correct, n = 0.0, 0, 0
    with torch.no_grad():
        for images, target in loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            loss_sum += criterion(output, target).item() * target.size(0)
            correct += (output.argmax(1) == target).sum().item()
            n += target.size(0)
    print(f"val loss {loss_sum / n:.3f} acc {correct / n:.3f}")
    return correct / n


def main():
    args = parser.parse_args()
    device = torch.device("cuda")
    model = models.resnet50().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 60, 80], gamma=0.1)
    train_loader, val_loader = loaders(args.data, args.batch_size)
    best = 0.0
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device)
        acc = validate(val_loader, model, criterion, device)
        scheduler.step()
        if acc > best:
            best = acc
            torch.save({"epoch": epoch, "model": model.state_dict()}, "best.pt")


if __name__ == "__main__":
    main()
