import torch


def pretrain(model, loader, cfg):
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    micro = 0
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch["input_ids"], labels=batch["labels"]).loss
        scaler.scale(loss).backward()
        micro += 1
        if micro == cfg.gradient_accumulation_steps:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            micro = 0
