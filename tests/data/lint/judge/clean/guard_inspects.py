import torch
from torch import nn

from steadystep import Guard


def train(model, optimizer, loader):
    guard = Guard(model, optimizer)
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        plan = guard.inspect(loss)
        if plan.proceeds:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        guard.commit(stepped=plan.proceeds)
