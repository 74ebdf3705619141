import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.optim.lr_scheduler import OneCycleLR

from birds import bird_loaders
from convnext import convnext_tiny


def fit(model, train_dl, valid_dl, epochs=20, peak=2e-3):
    opt = torch.optim.AdamW(model.parameters(), lr=peak / 10, weight_decay=0.05)
    sched = OneCycleLR(opt, max_lr=peak, total_steps=epochs * len(train_dl))
    scaler = GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(epochs):
        model.train()
        for x, y in train_dl:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            opt.zero_grad(set_to_none=True)
            with autocast("cuda", dtype=torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
        print(epoch, accuracy(model, valid_dl))


@torch.inference_mode()
def accuracy(model, loader):
    model.eval()
    right = n = 0
    for x, y in loader:
        with autocast("cuda", dtype=torch.float16):
            out = model(x.cuda())
        right += (out.argmax(1).cpu() == y).sum().item()
        n += len(y)
    return right / n


if __name__ == "__main__":
    train_dl, valid_dl = bird_loaders(64)
    fit(convnext_tiny(num_classes=200).cuda(), train_dl, valid_dl)
