from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
import torchvision.transforms as T
from torch.utils.data import DataLoader, Subset


@dataclass
class Config:
    temperature: float = 4.0
    alpha: float = 0.7
    epochs: int = 60
    lr: float = 0.05
    batch_size: int = 128
    teacher_ckpt: str = "teacher.pth"


class KDLoss(nn.Module):
    def __init__(self, t, alpha):
        super().__init__()
        self.t, self.alpha = t, alpha

    def forward(self, student_logits, teacher_logits, y):
        soft_targets = F.softmax(teacher_logits / self.t, dim=1)
        soft_student = F.log_softmax(student_logits / self.t, dim=1)
        kd = F.kl_div(soft_student, soft_targets, reduction="batchmean") * self.t ** 2
        ce = F.cross_entropy(student_logits, y)
        return self.alpha * kd + (1 - self.alpha) * ce


class Distiller:
    def __init__(self, cfg, teacher, student, device):
        self.cfg, self.device = cfg, device
        self.teacher = teacher.to(device).eval()
        for p in self.teacher.parameters():
            p.requires_grad_(False)
        self.student = student.to(device)
        self.loss = KDLoss(cfg.temperature, cfg.alpha)
        self.opt = torch.optim.SGD(self.student.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=5e-4)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.opt, [30, 45], gamma=0.1)

    def run_epoch(self, loader):
        self.student.train()
        seen, acc_loss = 0, 0.0
        for x, y in loader:
            x, y = x.to(self.device), y.to(self.device)
            with torch.no_grad():
                t_logits = self.teacher(x)
            loss = self.loss(self.student(x), t_logits, y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            acc_loss += loss.detach().item() * len(x)
            seen += len(x)
        self.sched.step()
        return acc_loss / seen

    @torch.no_grad()
    def accuracy(self, loader):
        self.student.eval()
        ok = sum((self.student(x.to(self.device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
        return ok / len(loader.dataset)


def main():
    cfg = Config()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    aug = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    train_full = torchvision.datasets.CIFAR100("data", train=True, download=True, transform=aug)
    val_full = torchvision.datasets.CIFAR100("data", train=True, transform=T.ToTensor())
    order = torch.randperm(50000, generator=torch.Generator().manual_seed(5)).tolist()
    train_dl = DataLoader(Subset(train_full, order[:45000]), cfg.batch_size, shuffle=True, num_workers=4)
    val_dl = DataLoader(Subset(val_full, order[45000:]), 256, num_workers=4)

    teacher = torchvision.models.resnet50(num_classes=100)
    teacher.load_state_dict(torch.load(cfg.teacher_ckpt, map_location="cpu"))
    student = torchvision.models.mobilenet_v2(num_classes=100)
    d = Distiller(cfg, teacher, student, device)
    best = 0.0
    for e in range(cfg.epochs):
        tl, va = d.run_epoch(train_dl), d.accuracy(val_dl)
        print(f"[{e:02d}] loss {tl:.3f} val {va:.4f}")
        if va > best:
            best = va
            torch.save(student.state_dict(), "student.pth")


if __name__ == "__main__":
    main()
