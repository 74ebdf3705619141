import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


class CenterLoss(nn.Module):
    def __init__(self, classes, dim):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, dim) * 0.1)

    def forward(self, f, y):
        return 0.5 * (f - self.centers[y]).pow(2).sum(1).mean()


class ArcMargin(nn.Module):
    def __init__(self, dim, classes, s=30.0, m=0.3):
        super().__init__()
        self.w = nn.Parameter(torch.empty(classes, dim))
        nn.init.xavier_uniform_(self.w)
        self.s, self.m = s, m

    def forward(self, f, y=None):
        cos = F.linear(F.normalize(f), F.normalize(self.w))
        if y is None:
            return cos * self.s
        theta = torch.acos(cos.clamp(-1 + 1e-6, 1 - 1e-6))
        onehot = F.one_hot(y, cos.size(1)).bool()
        return torch.where(onehot, torch.cos(theta + self.m), cos) * self.s


class FaceTrainer:
    lam = 0.003

    def __init__(self, train_dir, val_dir, device="cuda"):
        norm = transforms.Normalize((0.5,) * 3, (0.5,) * 3)
        ttf = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.Resize((112, 112)), transforms.ToTensor(), norm])
        vtf = transforms.Compose([transforms.Resize((112, 112)), transforms.ToTensor(), norm])
        tr, va = datasets.ImageFolder(train_dir, ttf), datasets.ImageFolder(val_dir, vtf)
        self.tl = DataLoader(tr, 128, shuffle=True, num_workers=8, drop_last=True)
        self.vl = DataLoader(va, 256, num_workers=8)
        self.dev = device
        net = models.resnet34(weights=None)
        net.fc = nn.Sequential(nn.Dropout(0.4), nn.Linear(net.fc.in_features, 256), nn.BatchNorm1d(256))
        self.net = net.to(device)
        self.arc = ArcMargin(256, len(tr.classes)).to(device)
        self.center = CenterLoss(len(tr.classes), 256).to(device)
        self.opt = torch.optim.SGD([{"params": self.net.parameters()}, {"params": self.arc.parameters(), "weight_decay": 5e-4}],
                                   lr=0.1, momentum=0.9)
        self.opt_center = torch.optim.SGD(self.center.parameters(), lr=0.5)
        self.sched = torch.optim.lr_scheduler.PolynomialLR(self.opt, total_iters=30, power=2.0)

    def step(self, x, y):
        f = self.net(x)
        ce = F.cross_entropy(self.arc(f, y), y)
        cl = self.center(f, y)
        self.opt.zero_grad()
        self.opt_center.zero_grad()
        (ce + self.lam * cl).backward()
        for p in self.center.parameters():
            p.grad.mul_(1.0 / self.lam)
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.opt.step()
        self.opt_center.step()
        return ce.item(), cl.item()

    @torch.no_grad()
    def evaluate(self):
        self.net.eval()
        ok = n = 0
        for x, y in self.vl:
            out = self.arc(self.net(x.to(self.dev)))
            ok += (out.argmax(1).cpu() == y).sum().item()
            n += len(y)
        return ok / n

    def fit(self, epochs=30):
        for e in range(epochs):
            self.net.train()
            hist = [self.step(x.to(self.dev), y.to(self.dev)) for x, y in self.tl]
            self.sched.step()
            ce, cl = (sum(v) / len(hist) for v in zip(*hist))
            print(f"{e:02d} ce {ce:.3f} center {cl:.2f} val acc {self.evaluate():.4f}")


if __name__ == "__main__":
    FaceTrainer("faces/train", "faces/val").fit()
