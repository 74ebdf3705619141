import torch
from torch import nn


def evaluate(model, loader, criterion):
    model.eval()
    total = 0.0
    for x, y in loader:
        output = model(x)
        total += criterion(output, y).item()
    return total / len(loader)


def train(model, loader, val_loader, criterion, optimizer, epochs):
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        print(evaluate(model, val_loader, criterion))
