import torch
from torch.optim.lr_scheduler import CosineAnnealingLR


def fit(model, train_loader, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    it = iter(train_loader)
    for i in range(steps):
        batch = next(it)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scheduler.step()
        optimizer.step()
        optimizer.zero_grad()
