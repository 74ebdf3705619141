import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from depthnet import DepthNet
from nyu import NYUDepth


def silog(pred, gt, lam=0.85):
    d = pred.clamp(min=1e-3).log() - gt.log()
    return (d.pow(2).mean() - lam * d.mean().pow(2)).sqrt()


class DepthTrainer:
    def __init__(self, device):
        self.device = device
        self.model = DepthNet(pretrained=True).to(device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, gamma=0.95)

    def train(self, loader):
        self.model.train()
        for rgb, depth in loader:
            rgb, depth = rgb.to(self.device), depth.to(self.device)
            loss = silog(self.model(rgb), depth)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.opt.step()
        self.sched.step()

    def validate(self, loader):
        self.model.eval()
        err, n = 0.0, 0
        for rgb, depth in loader:
            pred = self.model(rgb.to(self.device))
            err += ((pred.cpu() - depth).abs() / depth).mean().item()
            n += 1
        return err / n


if __name__ == "__main__":
    trainer = DepthTrainer("cuda")
    train_dl = DataLoader(NYUDepth("train"), 8, shuffle=True, num_workers=6)
    val_dl = DataLoader(NYUDepth("test"), 8, num_workers=6)
    for ep in range(25):
        trainer.train(train_dl)
        print(f"epoch {ep} absrel {trainer.validate(val_dl):.4f}")
