import torch
import torch.nn as nn


def run_epoch(model, loader, criterion, optimizer, device):
    model.train()
    running = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0)
        loss.backward()
        optimizer.step()
        running += loss.item() * images.size(0)
    return running / len(loader.dataset)
