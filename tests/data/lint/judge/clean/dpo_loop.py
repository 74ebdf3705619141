import copy

import torch
import torch.nn.functional as F


def logps(model, ids, mask):
    logits = model(ids).logits[:, :-1].log_softmax(-1)
    picked = logits.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return (picked * mask[:, 1:]).sum(1)


def dpo(model, loader, beta=0.1, lr=5e-7, accum=16, steps=1000):
    reference = copy.deepcopy(model).eval()
    model.train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 150))
    it = iter(loader)
    for step in range(steps):
        kept = 0.0
        for _ in range(accum):
            batch = next(it)
            with torch.no_grad():
                ref_c = logps(reference, batch["chosen"], batch["chosen_mask"])
                ref_r = logps(reference, batch["rejected"], batch["rejected_mask"])
            c = logps(model, batch["chosen"], batch["chosen_mask"])
            r = logps(model, batch["rejected"], batch["rejected_mask"])
            loss = -F.logsigmoid(beta * ((c - ref_c) - (r - ref_r))).mean()
            (loss / accum).backward()
            kept += loss.item() / accum
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        print(step, kept, float(norm))
