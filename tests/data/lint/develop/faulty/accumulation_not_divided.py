import torch
import torch.nn.functional as F

ACCUM_STEPS = 4


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    optimizer.zero_grad()
    for step, (x, y) in enumerate(loader):
        logits = model(x.to(device))
        loss = F.cross_entropy(logits, y.to(device))
        loss.backward()
        if (step + 1) % ACCUM_STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()
