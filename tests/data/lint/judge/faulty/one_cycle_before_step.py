import torch
from torch import nn


def train_model(model, dl, epochs, max_lr):
    opt = torch.optim.SGD(model.parameters(), lr=max_lr / 25, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=max_lr, total_steps=epochs * len(dl))
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(epochs):
        model.train()
        for xb, yb in dl:
            sched.step()
            opt.zero_grad()
            crit(model(xb), yb).backward()
            opt.step()
