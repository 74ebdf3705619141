import torch
import torch.nn.functional as F


def train_step(model, optimizer, x, y, history):
    optimizer.zero_grad()
    loss = F.smooth_l1_loss(model(x), y)
    loss = loss.detach()
    history.append(loss.item())
    loss.requires_grad_(True)
    loss.backward()
    optimizer.step()
