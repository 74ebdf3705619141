import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


def epoch(model, loader, opt, scaler: GradScaler, accum: int, clip: float):
    model.train()
    for i, (src, tgt) in enumerate(loader):
        with autocast("cuda", dtype=torch.float16):
            out = model(src, tgt[:, :-1])
            loss = F.cross_entropy(out.transpose(1, 2), tgt[:, 1:], ignore_index=0) / accum
        scaler.scale(loss).backward()
        if (i + 1) % accum == 0 or i + 1 == len(loader):
            total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            print(i, total_norm)
