import torch
from torch import nn
from torch.utils.data import DataLoader

from drive import RetinaPatches


class ConvBlock(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                         nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class SmallUNet(nn.Module):
    def __init__(self, base=32):
        super().__init__()
        self.e1, self.e2, self.mid = ConvBlock(3, base), ConvBlock(base, 2 * base), ConvBlock(2 * base, 4 * base)
        self.pool = nn.MaxPool2d(2)
        self.u2, self.u1 = nn.ConvTranspose2d(4 * base, 2 * base, 2, 2), nn.ConvTranspose2d(2 * base, base, 2, 2)
        self.d2, self.d1 = ConvBlock(4 * base, 2 * base), ConvBlock(2 * base, base)
        self.head = nn.Sequential(nn.Conv2d(base, 1, 1), nn.Sigmoid())

    def forward(self, x):
        a = self.e1(x)
        b = self.e2(self.pool(a))
        c = self.mid(self.pool(b))
        b = self.d2(torch.cat([self.u2(c), b], 1))
        return self.head(self.d1(torch.cat([self.u1(b), a], 1)))


class Meter:
    def __init__(self):
        self.s = self.n = 0

    def add(self, v, k=1):
        self.s += v * k
        self.n += k

    @property
    def avg(self):
        return self.s / max(self.n, 1)


def train(epochs=60, lr=1e-3):
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaders = {s: DataLoader(RetinaPatches(s), 16, shuffle=s == "train", num_workers=4) for s in ("train", "val")}
    net = SmallUNet().to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, 20, 0.3)
    loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0, device=dev))
    best = 0.0
    for epoch in range(epochs):
        stats = {}
        for split, dl in loaders.items():
            net.train(split == "train")
            loss_m, dice_m = Meter(), Meter()
            for img, msk in dl:
                img, msk = img.to(dev), msk.to(dev).float()
                with torch.set_grad_enabled(split == "train"):
                    pred = net(img)
                    loss = loss_fn(pred, msk)
                if split == "train":
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
                hard = (pred.detach() > 0.5).float()
                dice = (2 * (hard * msk).sum() / (hard.sum() + msk.sum()).clamp(min=1)).item()
                loss_m.add(loss.item(), len(img))
                dice_m.add(dice, len(img))
            stats[split] = (loss_m.avg, dice_m.avg)
        sched.step()
        print(epoch, {k: tuple(round(x, 4) for x in v) for k, v in stats.items()})
        if stats["val"][1] > best:
            best = stats["val"][1]
            torch.save(net.state_dict(), "vessels.pt")


if __name__ == "__main__":
    train()
