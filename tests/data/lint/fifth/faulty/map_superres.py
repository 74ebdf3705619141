"""x4 super-resolution of scanned maps."""
import random
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_tensor

SCALE, CROP = 4, 48


class MapPatches(Dataset):
    def __init__(self, folder, train):
        self.files = sorted(Path(folder).glob("*.png"))
        self.train = train

    def __len__(self):
        return len(self.files) * (20 if self.train else 1)

    def __getitem__(self, i):
        hr = to_tensor(Image.open(self.files[i % len(self.files)]).convert("RGB"))
        s = CROP * SCALE
        y, x = ((random.randint(0, hr.shape[1] - s), random.randint(0, hr.shape[2] - s)) if self.train else (0, 0))
        hr = hr[:, y:y + s, x:x + s]
        lr = F.interpolate(hr[None], scale_factor=1 / SCALE, mode="bicubic", antialias=True)[0].clamp(0, 1)
        return lr, hr


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(True), nn.Conv2d(c, c, 3, 1, 1))

    def forward(self, x):
        return x + 0.1 * self.f(x)


class MapSR(nn.Module):
    def __init__(self, c=96, n=16):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, 1, 1)
        self.body = nn.Sequential(*[Res(c) for _ in range(n)])
        self.tail = nn.Sequential(nn.Conv2d(c, c * 4, 3, 1, 1), nn.PixelShuffle(2), nn.Conv2d(c, c * 4, 3, 1, 1),
                                  nn.PixelShuffle(2), nn.Conv2d(c, 3, 3, 1, 1))

    def forward(self, x):
        h = self.head(x)
        return self.tail(h + self.body(h))


def psnr(net, loader):
    net.eval()
    out = []
    with torch.inference_mode():
        for lr, hr in loader:
            sr = net(lr.cuda()).clamp(0, 1)
            out.append(-10 * torch.log10(F.mse_loss(sr, hr.cuda())).item())
    net.train()
    return sum(out) / len(out)


def main(epochs=100):
    random.seed(1)
    torch.manual_seed(1)
    tr = DataLoader(MapPatches("maps/train", True), 16, shuffle=True, num_workers=8, drop_last=True)
    va = DataLoader(MapPatches("maps/val", False), 1)
    net = MapSR().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=2e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 40, 0.5)
    l1 = nn.L1Loss()
    best = 0.0
    net.train()
    for ep in range(epochs):
        agg = 0.0
        for lr, hr in tr:
            lr, hr = lr.cuda(non_blocking=True), hr.cuda(non_blocking=True)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                sr = net(lr)
                loss = l1(sr, hr)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            agg += loss.item()
        sched.step()
        q = psnr(net, va)
        print(f"{ep} L1 {agg / len(tr):.4f} PSNR {q:.2f} dB")
        if q > best:
            best = q
            torch.save(net.state_dict(), "mapsr.pt")


if __name__ == "__main__":
    main()
