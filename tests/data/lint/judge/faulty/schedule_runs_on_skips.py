import math

import torch


def train(model, optimizer, lr_scheduler, batches):
    model.train()
    skipped = 0
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch["x"], batch["y"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(norm.item()):
            optimizer.step()
        else:
            skipped += 1
        lr_scheduler.step()
    return skipped
