import torch
from torch.nn.utils import clip_grad_norm_


def train(model, loader, loss_fn):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1e4)
        optimizer.step()
