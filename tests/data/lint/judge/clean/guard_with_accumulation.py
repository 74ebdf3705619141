import torch

import steadystep
from steadystep import Guard


def train(model, loader, val_loader, loss_fn):
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    config = {
        "training": {
            "gradient_accumulation_steps": 4,
            "max_grad_norm": 1.0,
            "lr_scheduler": "cosine",
            "warmup_steps": 2000,
            "mixed_precision": "bf16",
        }
    }
    with Guard(model, optimizer, config=config, run_dir="runs/b") as guard:
        for batch in guard.batches(loader):
            outcome = guard.step(lambda b: loss_fn(model(b["x"]), b["y"]), batch=batch)
            if outcome.step % 500 == 0 and not outcome.pending:
                model.eval()
                with torch.no_grad():
                    guard.validate(sum(float(loss_fn(model(b["x"]), b["y"])) for b in val_loader) / len(val_loader))
                model.train()
