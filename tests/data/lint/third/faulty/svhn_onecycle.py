import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torchvision import datasets, transforms


def conv_bn(i, o, pool=False):
    layers = [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(2)) if pool else nn.Sequential(*layers)


class ResNet9(nn.Module):
    def __init__(self, n=10):
        super().__init__()
        self.c1, self.c2 = conv_bn(3, 64), conv_bn(64, 128, True)
        self.r1 = nn.Sequential(conv_bn(128, 128), conv_bn(128, 128))
        self.c3, self.c4 = conv_bn(128, 256, True), conv_bn(256, 512, True)
        self.r2 = nn.Sequential(conv_bn(512, 512), conv_bn(512, 512))
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, n))

    def forward(self, x):
        x = self.c2(self.c1(x))
        x = self.c4(self.c3(x + self.r1(x)))
        return self.head(x + self.r2(x))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    out = [(F.cross_entropy(model(x.to(device)), y.to(device)).item(),
            (model(x.to(device)).argmax(1).cpu() == y).float().mean().item()) for x, y in loader]
    return [sum(c) / len(c) for c in zip(*out)]


def fit(epochs, max_lr, model, train_loader, val_loader, device, grad_clip=0.1, wd=1e-4):
    optimizer = torch.optim.SGD(model.parameters(), max_lr / 25, momentum=0.9, weight_decay=wd)
    sched = OneCycleLR(optimizer, max_lr, epochs=epochs, steps_per_epoch=len(train_loader))
    history = []
    for epoch in range(epochs):
        model.train()
        train_losses, lrs = [], []
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            train_losses.append(loss.item())
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), grad_clip)
            lrs.append(optimizer.param_groups[0]["lr"])
            sched.step()
            optimizer.step()
        vloss, vacc = evaluate(model, val_loader, device)
        history.append(dict(train=sum(train_losses) / len(train_losses), val=vloss, acc=vacc, lr=lrs[-1]))
        print(epoch, {k: round(v, 5) for k, v in history[-1].items()})
    return history


if __name__ == "__main__":
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tt = transforms.Compose([transforms.RandomCrop(32, 4), transforms.ToTensor()])
    tr = datasets.SVHN("data", "train", tt, download=True)
    te = datasets.SVHN("data", "test", transforms.ToTensor(), download=True)
    tl = torch.utils.data.DataLoader(tr, 256, shuffle=True, num_workers=4, pin_memory=True)
    vl = torch.utils.data.DataLoader(te, 512, num_workers=4, pin_memory=True)
    fit(12, 0.1, ResNet9().to(dev), tl, vl, dev)
