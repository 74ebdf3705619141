import json
import sys

import imageio.v3 as iio
import numpy as np
import torch
import torch.nn as nn

dev = "cuda"


def encode(x, n):
    f = 2.0 ** torch.arange(n, device=x.device) * torch.pi
    a = x[..., None] * f
    return torch.cat([x, a.sin().flatten(-2), a.cos().flatten(-2)], -1)


class Radiance(nn.Module):
    def __init__(self, w=192):
        super().__init__()
        self.density = nn.Sequential(nn.Linear(63, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(),
                                     nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w + 1))
        self.color = nn.Sequential(nn.Linear(w + 27, w // 2), nn.ReLU(), nn.Linear(w // 2, 3))

    def forward(self, pts, dirs):
        h = self.density(encode(pts, 10))
        rgb = self.color(torch.cat([h[..., 1:], encode(dirs, 4)], -1)).sigmoid()
        return rgb, nn.functional.softplus(h[..., 0] - 1)


def march(net, o, d, n=96, near=2.0, far=6.0, jitter=True):
    t = torch.linspace(near, far, n, device=o.device).expand(o.size(0), n)
    if jitter:
        t = t + torch.rand_like(t) * (far - near) / n
    pts = o[:, None] + d[:, None] * t[..., None]
    rgb, sigma = net(pts, d[:, None].expand_as(pts))
    delta = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], 1)
    alpha = 1 - torch.exp(-sigma * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    w = alpha * trans
    return (w[..., None] * rgb).sum(1) + (1 - w.sum(1, keepdim=True))


def load(folder, split):
    meta = json.load(open(f"{folder}/transforms_{split}.json"))
    rays_o, rays_d, cols = [], [], []
    for fr in meta["frames"]:
        im = iio.imread(f"{folder}/{fr['file_path']}.png")[::4, ::4] / 255.0
        im = im[..., :3] * im[..., 3:] + 1 - im[..., 3:]
        h, w = im.shape[:2]
        f = 0.5 * w / np.tan(0.5 * meta["camera_angle_x"])
        j, i = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
        c2w = np.array(fr["transform_matrix"])
        d = np.stack([(i - w / 2) / f, -(j - h / 2) / f, -np.ones_like(i)], -1) @ c2w[:3, :3].T
        rays_d.append(d / np.linalg.norm(d, axis=-1, keepdims=True))
        rays_o.append(np.broadcast_to(c2w[:3, 3], d.shape))
        cols.append(im)
    return [torch.tensor(np.stack(a), dtype=torch.float32, device=dev).flatten(0, 2) for a in (rays_o, rays_d, cols)]


@torch.no_grad()
def psnr(net, rays, chunk=4096):
    net.eval()
    err = [((march(net, o, d, jitter=False) - c) ** 2).mean(1) for o, d, c in zip(*(r.split(chunk) for r in rays))]
    net.train()
    return -10 * torch.log10(torch.cat(err).mean()).item()


def main(folder):
    train, val = load(folder, "train"), load(folder, "val")
    net = Radiance().to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=5e-4)
    total = 100_000
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.1 ** (1 / total))
    opt.zero_grad()
    for it in range(1, total + 1):
        pick = torch.randint(0, train[0].size(0), (2048,), device=dev)
        o, d, c = (r[pick] for r in train)
        loss = nn.functional.mse_loss(march(net, o, d), c)
        loss.backward()
        if it % 500 == 0:
            total_norm = nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
            print(f"{it} mse {loss.item():.5f} grad norm {total_norm.item():.4f}")
        opt.step()
        sched.step()
        if it % 5000 == 0:
            print(f"   val psnr {psnr(net, val):.2f}")
        opt.zero_grad()


main(sys.argv[1])
