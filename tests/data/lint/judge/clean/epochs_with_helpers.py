import random

import numpy as np
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def forward_pass(model, batch, criterion, device):
    inputs = batch["pixels"].to(device)
    labels = batch["label"].to(device)
    logits = model(inputs)
    return criterion(logits, labels), logits, labels


def one_epoch(model, loader, criterion, optimizer, scheduler, device, writer, step):
    model.train()
    losses = []
    for batch in loader:
        loss, logits, labels = forward_pass(model, batch, criterion, device)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        writer.add_scalar("train/loss", loss, step)
        writer.add_scalar("train/grad_norm", norm, step)
        step += 1
    return torch.stack(losses).mean().item(), step


def evaluate(model, loader, criterion, device):
    model.eval()
    total_loss, correct, seen = 0.0, 0, 0
    with torch.no_grad():
        for batch in loader:
            loss, logits, labels = forward_pass(model, batch, criterion, device)
            total_loss += loss.item() * len(labels)
            correct += (logits.argmax(-1) == labels).sum().item()
            seen += len(labels)
    return total_loss / seen, correct / seen


def main(model, loaders, device="cpu", epochs=12):
    seed_all(5)
    model = model.to(device)
    writer = SummaryWriter()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=epochs * len(loaders["train"]))
    best, step = 0.0, 0
    for epoch in range(epochs):
        train_loss, step = one_epoch(model, loaders["train"], criterion, optimizer, scheduler, device, writer, step)
        val_loss, val_acc = evaluate(model, loaders["val"], criterion, device)
        if val_acc > best:
            best = val_acc
            torch.save(model.state_dict(), "best.pt")
        print(epoch, train_loss, val_loss, val_acc)
