import torch
from torch.optim.lr_scheduler import LambdaLR

WARMUP_STEPS = 20


def lr_lambda(step):
    return min(1.0, (step + 1) / WARMUP_STEPS)


def train(model, loader):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = LambdaLR(opt, lr_lambda)
    model.train()
    for x, y in loader:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
