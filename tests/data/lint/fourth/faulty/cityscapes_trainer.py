import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision.models.segmentation import deeplabv3_resnet50

from cityscapes import CityscapesFine


class PolyLR(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, opt, max_iter, power=0.9):
        super().__init__(opt, lambda it: (1 - min(it, max_iter - 1) / max_iter) ** power)


class SegTrainer:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda")
        self.model = deeplabv3_resnet50(weights_backbone="DEFAULT", num_classes=19).to(self.device)
        self.train_dl = DataLoader(CityscapesFine(args.root, "train"), args.bs, shuffle=True, num_workers=8, drop_last=True)
        self.val_dl = DataLoader(CityscapesFine(args.root, "val"), 2, num_workers=4)
        self.criterion = nn.CrossEntropyLoss(ignore_index=255)
        self.optimizer = torch.optim.SGD([
            {"params": self.model.backbone.parameters(), "lr": args.lr},
            {"params": self.model.classifier.parameters(), "lr": args.lr * 10},
        ], lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.scheduler = PolyLR(self.optimizer, args.epochs * len(self.train_dl))
        self.scaler = torch.cuda.amp.GradScaler()
        self.best = 0.0

    def optimizer_step(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        if self.args.clip > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def train_epoch(self, epoch):
        self.model.train()
        for it, (img, mask) in enumerate(self.train_dl):
            img, mask = img.to(self.device), mask.to(self.device)
            with torch.cuda.amp.autocast():
                loss = self.criterion(self.model(img)["out"], mask)
            self.optimizer_step(loss)
            if it % 50 == 0:
                print(f"epoch {epoch} it {it} loss {loss.item():.4f}")

    @torch.no_grad()
    def miou(self):
        self.model.eval()
        conf = torch.zeros(19, 19, device=self.device)
        for img, mask in self.val_dl:
            pred = self.model(img.to(self.device))["out"].argmax(1)
            mask = mask.to(self.device)
            keep = mask != 255
            idx = mask[keep] * 19 + pred[keep]
            conf += torch.bincount(idx, minlength=361).view(19, 19)
        inter = conf.diag()
        return (inter / (conf.sum(0) + conf.sum(1) - inter).clamp(min=1)).mean().item()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
            score = self.miou()
            print(f"epoch {epoch} mIoU {score:.4f}")
            if score > self.best:
                self.best = score
                torch.save(self.model.state_dict(), os.path.join(self.args.out, "best.pth"))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="data/cityscapes")
    p.add_argument("--out", default=".")
    p.add_argument("--bs", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--clip", type=float, default=10.0)
    p.add_argument("--epochs", type=int, default=60)
    SegTrainer(p.parse_args()).fit()
