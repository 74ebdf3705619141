"""Train a leaf-disease classifier in full precision and publish a half-precision copy."""
import copy
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms as tf

ROOT = "/srv/leaves"
DEV = torch.device("cuda")

aug = tf.Compose([tf.RandomResizedCrop(224), tf.RandomHorizontalFlip(), tf.ColorJitter(0.2, 0.2, 0.2), tf.ToTensor()])
plain = tf.Compose([tf.Resize(256), tf.CenterCrop(224), tf.ToTensor()])
train_set = datasets.ImageFolder(f"{ROOT}/train", aug)
valid_set = datasets.ImageFolder(f"{ROOT}/valid", plain)


def build(n):
    net = models.efficientnet_b0(weights="IMAGENET1K_V1")
    for p in net.features[:4].parameters():
        p.requires_grad = False
    net.classifier[1] = nn.Linear(net.classifier[1].in_features, n)
    return net.to(DEV)


def groups(net):
    head = list(net.classifier.parameters())
    body = [p for p in net.features.parameters() if p.requires_grad]
    return [{"params": body, "lr": 1e-4}, {"params": head, "lr": 1e-3}]


def check(net, loader, dtype=torch.float32):
    net.eval()
    hits, n, t0 = 0, 0, time.perf_counter()
    with torch.no_grad():
        for x, y in loader:
            out = net(x.to(DEV, dtype))
            hits += (out.float().softmax(1).argmax(1).cpu() == y).sum().item()
            n += len(y)
    return hits / n, time.perf_counter() - t0


def main():
    train = DataLoader(train_set, 64, shuffle=True, num_workers=8, drop_last=True)
    valid = DataLoader(valid_set, 128, num_workers=8)
    net = build(len(train_set.classes))
    opt = torch.optim.Adam(groups(net))
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=15)
    ce = nn.CrossEntropyLoss()
    best, keep = 0.0, None

    for epoch in range(15):
        net.train()
        net.features[:4].eval()
        loss_sum = 0.0
        for x, y in train:
            x, y = x.to(DEV), y.to(DEV)
            logits = net(x)
            loss = ce(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            loss_sum += loss.item() * x.size(0)
        sched.step()
        acc, _ = check(net, valid)
        print(f"epoch {epoch} loss {loss_sum / len(train_set):.4f} valid acc {acc:.4f}")
        if acc > best:
            best, keep = acc, copy.deepcopy(net.state_dict())

    net.load_state_dict(keep)
    acc32, t32 = check(net, valid)
    served = copy.deepcopy(net).half()
    acc16, t16 = check(served, valid, torch.float16)
    print(f"fp32 {acc32:.4f} in {t32:.1f}s, fp16 {acc16:.4f} in {t16:.1f}s")
    torch.save(served.state_dict(), "leaf_fp16.pt")


if __name__ == "__main__":
    main()
