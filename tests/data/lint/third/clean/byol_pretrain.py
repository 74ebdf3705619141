import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def projector(i, h=1024, o=128):
    return nn.Sequential(nn.Linear(i, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, o))


class BYOL(nn.Module):
    def __init__(self, backbone, dim):
        super().__init__()
        self.online = nn.Sequential(backbone, projector(dim))
        self.predictor = projector(128, 512, 128)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def loss(self, v1, v2):
        p1, p2 = self.predictor(self.online(v1)), self.predictor(self.online(v2))
        with torch.no_grad():
            t1, t2 = self.target(v1), self.target(v2)
        d = lambda p, t: 2 - 2 * F.cosine_similarity(p, t, dim=-1)
        return (d(p1, t2) + d(p2, t1)).mean()

    @torch.no_grad()
    def ema(self, m):
        for o, t in zip(self.online.parameters(), self.target.parameters()):
            t.data.mul_(m).add_(o.data, alpha=1 - m)


class Runner:
    def __init__(self, model, loader, epochs, accum=4, lr=1e-3, warm_epochs=10, device="cuda"):
        self.model, self.loader, self.epochs, self.accum, self.device = model.to(device), loader, epochs, accum, device
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.opt = torch.optim.AdamW(trainable, lr=lr, weight_decay=1e-2)
        self.updates_per_epoch = len(loader) // accum
        total, warm = epochs * self.updates_per_epoch, max(2000, warm_epochs * self.updates_per_epoch)

        def shape(u):
            if u < warm:
                return (u + 1) / warm
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (u - warm) / max(1, total - warm))))

        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, shape)
        self.total, self.updates = total, 0

    def _update(self):
        nn.utils.clip_grad_norm_((p for g in self.opt.param_groups for p in g["params"]), 3.0)
        self.opt.step()
        self.sched.step()
        self.opt.zero_grad(set_to_none=True)
        m = 1 - (1 - 0.996) * (math.cos(math.pi * self.updates / self.total) + 1) / 2
        self.model.ema(m)
        self.updates += 1

    def fit(self):
        self.model.train()
        for epoch in range(self.epochs):
            seen = 0.0
            self.opt.zero_grad(set_to_none=True)
            for i, (v1, v2) in enumerate(self.loader):
                if i >= self.updates_per_epoch * self.accum:
                    break
                loss = self.model.loss(v1.to(self.device), v2.to(self.device))
                (loss / self.accum).backward()
                seen += loss.item()
                if (i + 1) % self.accum == 0:
                    self._update()
            print(f"{epoch} {seen / max(1, i):.4f} lr {self.sched.get_last_lr()[0]:.2e}")
            torch.save(self.model.online[0].state_dict(), "byol_backbone.pt")


if __name__ == "__main__":
    from torchvision.models import resnet18

    from views import make_loader

    torch.manual_seed(7)
    net = resnet18()
    net.fc = nn.Identity()
    Runner(BYOL(net, 512), make_loader(128), epochs=300).fit()
