import torch
import torch.nn.functional as F

IGNORE = -100


def token_loss(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")


def train(model, groups, optimizer, scheduler):
    """`groups` yields lists of micro-batches; each token counts the same."""
    model.train()
    for micro_batches in groups:
        tokens = sum((b["labels"] != IGNORE).sum() for b in micro_batches)
        running = 0.0
        for batch in micro_batches:
            loss = token_loss(model, batch) / tokens
            loss.backward()
            running += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        print(running)
