import torch
import torch.nn as nn
from torch.cuda import amp
from torch.utils.data import DataLoader

from superres import PatchPairs, psnr
from edsr import EDSR

ITERS_LOG = 200


def fit(model, loader, optimizer, scaler, loss_fn):
    model.train()
    for it, (low, high) in enumerate(loader):
        low, high = low.cuda(), high.cuda()
        with amp.autocast():
            loss = loss_fn(model(low), high)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        if it % ITERS_LOG == 0:
            print(f"  {it}: {loss.item():.4f}")


@torch.no_grad()
def mean_psnr(model, loader):
    model.eval()
    vals = []
    for low, high in loader:
        with amp.autocast():
            out = model(low.cuda())
        vals.append(psnr(out.float().cpu(), high))
    return sum(vals) / len(vals)


def main():
    model = EDSR(scale=2).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    halve = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    scaler = amp.GradScaler()
    loss_fn = nn.L1Loss()
    train_dl = DataLoader(PatchPairs("DIV2K/train"), 16, shuffle=True)
    valid_dl = DataLoader(PatchPairs("DIV2K/valid"), 1)
    for epoch in range(300):
        fit(model, train_dl, optimizer, scaler, loss_fn)
        halve.step()
        print(epoch, mean_psnr(model, valid_dl))


if __name__ == "__main__":
    main()
