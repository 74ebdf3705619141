import torch
from torch import nn


def train(cell, head, stream, optimizer, k=20):
    """Truncated backpropagation through time: one update every `k` symbols."""
    hidden = torch.zeros(1, cell.hidden_size)
    loss, count = 0.0, 0
    for symbol, wanted in stream:
        hidden = cell(symbol, hidden)
        loss = loss + nn.functional.cross_entropy(head(hidden), wanted)
        count += 1
        if count == k:
            optimizer.zero_grad()
            (loss / k).backward()
            nn.utils.clip_grad_norm_([*cell.parameters(), *head.parameters()], 1.0)
            optimizer.step()
            print(loss.item() / k)
            hidden = hidden.detach()
            loss, count = 0.0, 0
