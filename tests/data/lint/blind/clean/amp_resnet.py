import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as T
from torch.cuda.amp import GradScaler, autocast

EPOCHS = 30
device = "cuda"


def build_loaders():
    mean, std = (0.49, 0.48, 0.44), (0.2, 0.2, 0.2)
    aug = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)])
    plain = T.Compose([T.ToTensor(), T.Normalize(mean, std)])
    tr = torchvision.datasets.CIFAR10("data", True, aug, download=True)
    te = torchvision.datasets.CIFAR10("data", False, plain, download=True)
    return (torch.utils.data.DataLoader(tr, 128, shuffle=True, num_workers=4),
            torch.utils.data.DataLoader(te, 512, num_workers=4))


def main():
    train_loader, test_loader = build_loaders()
    net = torchvision.models.resnet18(num_classes=10).to(device)
    loss_fn = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=EPOCHS * len(train_loader))
    scaler = GradScaler()

    for epoch in range(EPOCHS):
        net.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            opt.zero_grad(set_to_none=True)
            with autocast():
                loss = loss_fn(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), max_norm=5.0)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() >= before:
                sched.step()

        net.eval()
        hits = 0
        with torch.no_grad(), autocast():
            for x, y in test_loader:
                hits += (net(x.to(device)).argmax(1).cpu() == y).sum().item()
        print(epoch, hits / len(test_loader.dataset))


if __name__ == "__main__":
    main()
