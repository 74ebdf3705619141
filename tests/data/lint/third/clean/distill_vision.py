import argparse

import torch
import torch.nn.functional as F
import torchvision.models as models
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def kd_loss(student_logits, teacher_logits, targets, T=4.0, alpha=0.7):
    soft_targets = F.softmax(teacher_logits / T, dim=1)
    log_student = F.log_softmax(student_logits / T, dim=1)
    soft = F.kl_div(log_student, soft_targets, reduction="batchmean") * T * T
    hard = F.cross_entropy(student_logits, targets)
    return alpha * soft + (1 - alpha) * hard


def soft_ce(student_logits, teacher_logits):
    # cross_entropy takes class probabilities as its target
    return F.cross_entropy(student_logits, teacher_logits.softmax(dim=1))


def data(root, bs):
    norm = transforms.Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
    tr = transforms.Compose([transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm])
    te = transforms.Compose([transforms.ToTensor(), norm])
    return (DataLoader(datasets.CIFAR100(root, True, tr, download=True), bs, shuffle=True, num_workers=4),
            DataLoader(datasets.CIFAR100(root, False, te, download=True), 2 * bs, num_workers=4))


def run_eval(net, dl, device):
    net.eval()
    ok = tot = 0
    with torch.no_grad():
        for x, y in dl:
            ok += net(x.to(device)).argmax(1).eq(y.to(device)).sum().item()
            tot += len(y)
    return 100 * ok / tot


def train_epoch(student, teacher, dl, opt, args, device):
    student.train()
    teacher.eval()
    meter, n = 0.0, 0
    for x, y in dl:
        x, y = x.to(device), y.to(device)
        with torch.no_grad():
            t_logits = teacher(x)
        s_logits = student(x)
        if args.hard_labels:
            loss = kd_loss(s_logits, t_logits, y, args.T, args.alpha)
        else:
            loss = soft_ce(s_logits, t_logits)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        opt.step()
        opt.zero_grad()
        meter += loss.item() * len(y)
        n += len(y)
    return meter / n


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--teacher", required=True)
    p.add_argument("--T", type=float, default=4.0)
    p.add_argument("--alpha", type=float, default=0.7)
    p.add_argument("--hard-labels", action="store_true")
    p.add_argument("--epochs", type=int, default=120)
    args = p.parse_args()
    device = torch.device("cuda")
    tl, vl = data("data", 128)
    teacher = models.resnet50(num_classes=100).to(device)
    teacher.load_state_dict(torch.load(args.teacher, map_location=device))
    for q in teacher.parameters():
        q.requires_grad_(False)
    student = models.mobilenet_v2(num_classes=100).to(device)
    opt = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    print("teacher:", run_eval(teacher, vl, device))
    for e in range(args.epochs):
        loss = train_epoch(student, teacher, tl, opt, args, device)
        sched.step()
        print(f"{e} kd {loss:.4f} student acc {run_eval(student, vl, device):.2f}")
    torch.save(student.state_dict(), "student.pth")


if __name__ == "__main__":
    main()
