import argparse

import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import models
from torchvision.transforms import functional as TF

TAPS = {1: 1.0, 6: 0.8, 11: 0.6, 20: 0.4}
CONTENT_TAP = 22


def read(path, size, dev):
    im = TF.resize(Image.open(path).convert("RGB"), [size, size])
    return TF.normalize(TF.to_tensor(im), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[None].to(dev)


def write(x, path):
    std = torch.tensor([0.229, 0.224, 0.225], device=x.device).view(1, 3, 1, 1)
    mean = torch.tensor([0.485, 0.456, 0.406], device=x.device).view(1, 3, 1, 1)
    TF.to_pil_image((x.detach() * std + mean).clamp(0, 1)[0].cpu()).save(path)


def gram(f):
    b, c, h, w = f.shape
    f = f.reshape(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)


class Taps:
    def __init__(self, dev):
        self.layers = models.vgg19(weights="DEFAULT").features.eval().to(dev)
        for p in self.layers.parameters():
            p.requires_grad_(False)

    def __call__(self, x):
        out = {}
        for i, l in enumerate(self.layers):
            x = F.relu(x) if isinstance(l, torch.nn.ReLU) else l(x)
            if i in TAPS or i == CONTENT_TAP:
                out[i] = x
            if i == max(CONTENT_TAP, *TAPS):
                return out


def smoothness(x):
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


def transfer(content, style, taps, iters, style_w, tv_w):
    with torch.no_grad():
        want_c = taps(content)[CONTENT_TAP]
        want_s = {k: gram(v) for k, v in taps(style).items() if k in TAPS}
    canvas = content.clone().requires_grad_(True)
    opt = torch.optim.LBFGS([canvas], lr=1, max_iter=20)
    calls = [0]

    def closure():
        opt.zero_grad()
        got = taps(canvas)
        loss = F.mse_loss(got[CONTENT_TAP], want_c) + tv_w * smoothness(canvas)
        for k, w in TAPS.items():
            loss = loss + style_w * w * F.mse_loss(gram(got[k]), want_s[k])
        loss.backward()
        calls[0] += 1
        if calls[0] % 50 == 0:
            print(calls[0], loss.item())
        return loss

    while calls[0] < iters:
        opt.step(closure)
    return canvas


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("content")
    p.add_argument("style")
    p.add_argument("--size", type=int, default=512)
    p.add_argument("--iters", type=int, default=400)
    p.add_argument("--style-weight", type=float, default=1e5)
    p.add_argument("--tv", type=float, default=1e-2)
    p.add_argument("--out", default="out.png")
    a = p.parse_args()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    net = Taps(dev)
    result = transfer(read(a.content, a.size, dev), read(a.style, a.size, dev), net, a.iters, a.style_weight, a.tv)
    write(result, a.out)
