import torch
from torch import nn


def train(net0, net1, loader, loss_fn, epochs):
    opt0 = torch.optim.AdamW(net0.parameters(), lr=1e-3)
    opt1 = torch.optim.AdamW(net1.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            opt0.zero_grad()
            opt1.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out0, out1 = net0(x), net1(x)
                loss0 = loss_fn(2 * out0 + 3 * out1, y)
                loss1 = loss_fn(3 * out0 - 5 * out1, y)
            scaler.scale(loss0).backward(retain_graph=True)
            scaler.scale(loss1).backward()
            scaler.unscale_(opt0)
            nn.utils.clip_grad_norm_(net0.parameters(), 1.0)
            scaler.step(opt0)
            scaler.step(opt1)
            scaler.update()
