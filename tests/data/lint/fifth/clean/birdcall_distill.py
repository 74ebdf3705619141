"""Compress a large birdcall classifier into a tiny one for field recorders."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader

from birddata import MelClips  # yields (1 x 128 x 256 mel, species id)


class Pebble(nn.Module):
    def __init__(self, n_species, w=24):
        super().__init__()
        layers, c = [], 1
        for k in (1, 2, 4, 8):
            layers += [nn.Conv2d(c, w * k, 3, stride=2, padding=1), nn.BatchNorm2d(w * k), nn.ReLU(inplace=True)]
            c = w * k
        self.trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
        self.fc = nn.Linear(c, n_species)

    def forward(self, mel):
        return self.fc(self.trunk(mel))


def load_teacher(path, n):
    t = torchvision.models.resnet50(num_classes=n)
    t.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    t.load_state_dict(torch.load(path, map_location="cpu"))
    t.eval()
    for p in t.parameters():
        p.requires_grad_(False)
    return t


def kd_term(student_logits, teacher_logits, T):
    soft_targets = F.softmax(teacher_logits / T, dim=1)
    log_student = F.log_softmax(student_logits / T, dim=1)
    return F.kl_div(log_student, soft_targets, reduction="batchmean") * T * T


def accuracy(net, dl, device):
    net.eval()
    hit = n = 0
    with torch.no_grad():
        for mel, sp in dl:
            hit += (net(mel.to(device)).argmax(1).cpu() == sp).sum().item()
            n += sp.numel()
    return hit / n


def run(a):
    device = torch.device(a.device)
    train_dl = DataLoader(MelClips(a.root, "train"), a.bs, shuffle=True, num_workers=6, drop_last=True)
    held_dl = DataLoader(MelClips(a.root, "heldout"), a.bs)
    teacher = load_teacher(a.teacher, a.species).to(device)
    student = Pebble(a.species).to(device)
    hard = nn.CrossEntropyLoss(label_smoothing=0.05)
    opt = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=a.epochs)
    for ep in range(1, a.epochs + 1):
        student.train()
        tot = torch.zeros((), device=device)
        for mel, sp in train_dl:
            mel, sp = mel.to(device), sp.to(device)
            with torch.no_grad():
                t_logits = teacher(mel)
            s_logits = student(mel)
            loss = a.alpha * kd_term(s_logits, t_logits, a.T) + (1 - a.alpha) * hard(s_logits, sp)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += loss.detach()
        sched.step()
        print(f"ep {ep} loss {tot.item() / len(train_dl):.4f} heldout acc {accuracy(student, held_dl, device):.4f}")
    torch.save(student.state_dict(), a.out)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("teacher")
    p.add_argument("--species", type=int, default=264)
    p.add_argument("--bs", type=int, default=128)
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--alpha", type=float, default=0.7)
    p.add_argument("--T", type=float, default=4.0)
    p.add_argument("--device", default="cuda")
    p.add_argument("--out", default="pebble.pt")
    run(p.parse_args())
