import math

import torch
from torch import nn


@torch.no_grad()
def clip_gradients(parameters, limit):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
    scale = limit / (norm + 1e-6)
    if scale < 1:
        for g in grads:
            g.mul_(scale)
    return norm


def train(net: nn.Module, batches, steps: int):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    for step, (src, tgt) in zip(range(1, steps + 1), batches):
        for group in optimizer.param_groups:
            group["lr"] = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        loss = nn.functional.cross_entropy(net(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"loss is {loss.item()} at step {step}")
        for p in net.parameters():
            p.grad = None
        loss.backward()
        norm = clip_gradients(list(net.parameters()), 1.0)
        optimizer.step()
        print(step, loss.item(), norm.item())
