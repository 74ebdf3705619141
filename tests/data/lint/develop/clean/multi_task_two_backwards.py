import torch
import torch.nn.functional as F


def train_epoch(encoder, heads, loaders, optimizer):
    encoder.train()
    for head in heads.values():
        head.train()
    totals = {name: 0.0 for name in heads}
    for batches in zip(*loaders.values()):
        optimizer.zero_grad()
        for name, (x, y) in zip(loaders, batches):
            loss = F.cross_entropy(heads[name](encoder(x)), y)
            loss.backward()
            totals[name] += loss.item()
        optimizer.step()
    return totals


def train_shared(encoder, a, b, loader, optimizer):
    for x, ya, yb in loader:
        optimizer.zero_grad()
        features = encoder(x)
        loss_a = F.cross_entropy(a(features), ya)
        loss_b = F.mse_loss(b(features), yb)
        loss_a.backward(retain_graph=True)
        loss_b.backward()
        optimizer.step()
