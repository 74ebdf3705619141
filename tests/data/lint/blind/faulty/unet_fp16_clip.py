import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from roads import RoadMasks
from unet import UNet


def dice(pred, mask):
    inter = (pred & mask).sum().item()
    return 2 * inter / max(pred.sum().item() + mask.sum().item(), 1)


def train_epoch(model, loader, criterion, optimizer, scaler):
    model.train()
    total = 0.0
    for image, mask in loader:
        image, mask = image.cuda(), mask.cuda()
        optimizer.zero_grad()
        with autocast():
            logits = model(image)
            loss = criterion(logits, mask.float())
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / len(loader)


def validate(model, loader):
    model.eval()
    scores = []
    with torch.no_grad():
        for image, mask in loader:
            with autocast():
                logits = model(image.cuda())
            scores.append(dice(logits > 0, mask.cuda().bool()))
    return sum(scores) / len(scores)


def main():
    model = UNet(3, 1).cuda()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=4)
    scaler = GradScaler()
    train_dl = DataLoader(RoadMasks("train"), 8, shuffle=True)
    val_dl = DataLoader(RoadMasks("val"), 8)
    for epoch in range(50):
        loss = train_epoch(model, train_dl, criterion, optimizer, scaler)
        score = validate(model, val_dl)
        scheduler.step(score)
        print(epoch, loss, score)


if __name__ == "__main__":
    main()
