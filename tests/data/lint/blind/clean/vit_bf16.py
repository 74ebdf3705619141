import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from imagedata import make_loaders


class Engine:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda")
        self.model = timm.create_model("vit_small_patch16_224", drop_path_rate=0.1).to(self.device)
        self.mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=1000)
        self.criterion = SoftTargetCrossEntropy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.05)
        self.train_loader, self.val_loader = make_loaders(args.data, args.batch_size)
        steps = args.epochs * len(self.train_loader)
        warm = 10_000
        self.scheduler = SequentialLR(
            self.optimizer,
            [LinearLR(self.optimizer, start_factor=1e-3, total_iters=warm),
             CosineAnnealingLR(self.optimizer, T_max=steps - warm)],
            milestones=[warm],
        )

    def one_epoch(self):
        self.model.train()
        running = 0.0
        for images, target in self.train_loader:
            images, target = self.mix(images.to(self.device), target.to(self.device))
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.criterion(self.model(images), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            running += loss.item()
        return running / len(self.train_loader)

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        hit = total = 0
        for images, target in self.val_loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                pred = self.model(images.to(self.device)).argmax(1)
            hit += (pred.cpu() == target).sum().item()
            total += len(target)
        return hit / total

    def run(self):
        for epoch in range(self.args.epochs):
            train_loss = self.one_epoch()
            print(f"{epoch}: loss {train_loss:.3f} acc {self.accuracy():.3f}")
