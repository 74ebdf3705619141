import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

from models import build_encoder
from textdata import train_loader, valid_loader

ACCUM = 8
CLIP = 1.0
EPOCHS = 5


def compute_loss(model, batch):
    with autocast("cuda", dtype=torch.float16):
        logits = model(batch["ids"].cuda(), batch["mask"].cuda())
        return F.cross_entropy(logits, batch["label"].cuda())


def apply_update(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def main():
    model = build_encoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    scaler = GradScaler("cuda")
    for epoch in range(EPOCHS):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for i, batch in enumerate(train_loader):
            loss = compute_loss(model, batch) / ACCUM
            scaler.scale(loss).backward()
            if (i + 1) % ACCUM == 0 or i + 1 == len(train_loader):
                apply_update(model, optimizer, scaler)
        scheduler.step()

        model.eval()
        with torch.no_grad():
            vals = [compute_loss(model, b).item() for b in valid_loader]
        print(f"epoch {epoch}: valid {sum(vals) / len(vals):.4f}")


if __name__ == "__main__":
    main()
