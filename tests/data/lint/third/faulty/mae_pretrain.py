import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class TinyMAE(nn.Module):
    def __init__(self, img=96, p=8, d=192, depth=6, dd=96, ratio=0.75):
        super().__init__()
        self.p, self.n, self.ratio = p, (img // p) ** 2, ratio
        self.embed = nn.Linear(3 * p * p, d)
        self.pos = nn.Parameter(torch.randn(1, self.n, d) * 0.02)
        mk = lambda w, k: nn.TransformerEncoder(nn.TransformerEncoderLayer(w, 6, 4 * w, 0.0, "gelu", batch_first=True, norm_first=True), k)
        self.enc, self.dec = mk(d, depth), mk(dd, 2)
        self.bridge = nn.Linear(d, dd)
        self.mask_tok = nn.Parameter(torch.zeros(1, 1, dd))
        self.dpos = nn.Parameter(torch.randn(1, self.n, dd) * 0.02)
        self.out = nn.Linear(dd, 3 * p * p)

    def patches(self, x):
        return nn.functional.unfold(x, self.p, stride=self.p).transpose(1, 2)

    def forward(self, x):
        t = self.patches(x)
        B, N, _ = t.shape
        keep = int(N * (1 - self.ratio))
        order = torch.rand(B, N, device=x.device).argsort(1)
        back = order.argsort(1)
        h = self.embed(t) + self.pos
        h = torch.gather(h, 1, order[:, :keep, None].expand(-1, -1, h.size(-1)))
        h = self.bridge(self.enc(h))
        h = torch.cat([h, self.mask_tok.expand(B, N - keep, -1)], 1)
        h = torch.gather(h, 1, back[..., None].expand(-1, -1, h.size(-1))) + self.dpos
        err = (self.out(self.dec(h)) - t).pow(2).mean(-1)
        mask = (back >= keep).float()
        return (err * mask).sum() / mask.sum()


def schedule(opt, warm, total):
    def f(s):
        if s < warm:
            return (s + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1, (s - warm) / (total - warm))))
    return torch.optim.lr_scheduler.LambdaLR(opt, f)


def main(epochs=200, bs=128, accum=8):
    dev = torch.device("cuda")
    tf = transforms.Compose([transforms.RandomResizedCrop(96, (0.3, 1)), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    dl = DataLoader(datasets.STL10("data", "unlabeled", transform=tf), bs, shuffle=True, drop_last=True, num_workers=8)
    model = TinyMAE().to(dev)
    opt = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05)
    per_epoch = len(dl) // accum
    sched = schedule(opt, 10 * per_epoch, epochs * per_epoch)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        opt.zero_grad()
        for i, (x, _) in enumerate(dl):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x.to(dev, non_blocking=True))
            (loss / accum).backward()
            total += loss.item()
            if (i + 1) % accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            sched.step()
        print(f"{epoch} {total / len(dl):.4f} lr {sched.get_last_lr()[0]:.2e}")
        torch.save(model.state_dict(), "mae.pt")


if __name__ == "__main__":
    main()
