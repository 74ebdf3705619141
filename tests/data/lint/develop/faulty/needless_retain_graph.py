import torch
from torch import nn


def train(model, loader, optimizer):
    criterion = nn.MSELoss()
    model.train()
    for features, target in loader:
        optimizer.zero_grad()
        prediction = model(features)
        loss = criterion(prediction, target)
        loss.backward(retain_graph=True)
        optimizer.step()
