import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


def rotate_batch(x):
    k = torch.randint(0, 4, (len(x),))
    return torch.stack([torch.rot90(im, int(r), (1, 2)) for im, r in zip(x, k)]), k


def build(n=4):
    net = models.resnet18(num_classes=n)
    net.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    net.maxpool = nn.Identity()
    net.fc = nn.Sequential(nn.Dropout(0.3), net.fc)
    return net


def evaluate(net, loader, device):
    net.eval()
    hits = count = 0
    with torch.no_grad():
        for x, _ in loader:
            xr, k = rotate_batch(x)
            hits += (net(xr.to(device)).argmax(1).cpu() == k).sum().item()
            count += len(k)
    return hits / count


def infinite(loader):
    while True:
        yield from loader


def main(max_iters=40_000, eval_every=1000, lr=0.1):
    torch.manual_seed(21)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tf = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor(),
                             transforms.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))])
    full = datasets.CIFAR10("data", True, tf, download=True)
    train_dl = DataLoader(Subset(full, range(45000)), 128, shuffle=True, drop_last=True, num_workers=4)
    val_dl = DataLoader(Subset(full, range(45000, 50000)), 256, num_workers=2)
    net = build().to(device)
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [20_000, 30_000, 36_000], 0.2)
    stream = infinite(train_dl)
    net.train()
    best, avg = 0.0, None
    for it in range(1, max_iters + 1):
        x, _ = next(stream)
        xr, k = rotate_batch(x)
        loss = F.cross_entropy(net(xr.to(device)), k.to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        avg = loss.item() if avg is None else 0.99 * avg + 0.01 * loss.item()
        if it % eval_every == 0:
            acc = evaluate(net, val_dl, device)
            print(f"{it} loss {avg:.4f} val rotation acc {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(net.state_dict(), "rotnet.pt")


if __name__ == "__main__":
    main()
