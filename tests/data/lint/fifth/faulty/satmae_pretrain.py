import argparse
import math
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from sentinel import Chips


class MaskedAE(nn.Module):
    def __init__(self, bands=10, img=96, p=8, d=384, depth=8, dd=192, ddepth=2):
        super().__init__()
        self.p, self.n = p, (img // p) ** 2
        self.embed = nn.Linear(bands * p * p, d)
        self.pos = nn.Parameter(torch.randn(1, self.n, d) * 0.02)
        mk = lambda w, k: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(w, 6, 4 * w, 0.0, "gelu", batch_first=True, norm_first=True), k)
        self.enc, self.dec = mk(d, depth), mk(dd, ddepth)
        self.narrow = nn.Linear(d, dd)
        self.blank = nn.Parameter(torch.zeros(1, 1, dd))
        self.dpos = nn.Parameter(torch.randn(1, self.n, dd) * 0.02)
        self.pix = nn.Linear(dd, bands * p * p)

    def cut(self, x):
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // self.p, self.p, w // self.p, self.p)
        return x.permute(0, 2, 4, 1, 3, 5).reshape(b, self.n, -1)

    def forward(self, x, ratio=0.75):
        t = self.cut(x)
        b = t.size(0)
        keep = int(self.n * (1 - ratio))
        order = torch.rand(b, self.n, device=x.device).argsort(1)
        vis = order[:, :keep]
        h = self.embed(t) + self.pos
        h = self.enc(h.gather(1, vis[..., None].expand(-1, -1, h.size(-1))))
        full = self.blank.to(h.dtype).expand(b, self.n, -1).clone()
        y = self.narrow(h)
        full = full.to(y.dtype).scatter(1, vis[..., None].expand(-1, -1, y.size(-1)), y) + self.dpos
        pred = self.pix(self.dec(full)).float()
        mask = torch.ones(b, self.n, device=x.device).scatter(1, vis, 0.0)
        target = (t - t.mean(-1, keepdim=True)) / (t.var(-1, keepdim=True) + 1e-6).sqrt()
        return (((pred - target) ** 2).mean(-1) * mask).sum() / mask.sum()


def lr_factor(step, warm, total):
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--chips", required=True)
    ap.add_argument("--epochs", type=int, default=200)
    ap.add_argument("--bs", type=int, default=256)
    ap.add_argument("--lr", type=float, default=6e-4)
    ap.add_argument("--out", default="mae_runs")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    torch.manual_seed(0)
    dl = DataLoader(Chips(a.chips), a.bs, shuffle=True, drop_last=True, num_workers=12, pin_memory=True)
    model = MaskedAE().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.05)
    total = a.epochs * len(dl)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: lr_factor(s, total // 10, total))
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for ep in range(a.epochs):
        mean = 0.0
        for x in dl:
            x = x.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            sched.step()
            mean += loss.item() / len(dl)
        print(f"{ep} {mean:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
        if ep % 20 == 0 or ep == a.epochs - 1:
            torch.save(model.state_dict(), os.path.join(a.out, f"mae_{ep}.pt"))


if __name__ == "__main__":
    main()
