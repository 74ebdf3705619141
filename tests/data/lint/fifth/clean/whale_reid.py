"""Humpback fluke re-identification with batch-hard triplets and an auxiliary id classifier."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import models

from flukes import FlukeSet, IdentityBatches

AMP = torch.float16
device = torch.device("cuda")


class FlukeNet(nn.Module):
    def __init__(self, n_ids, dim=256):
        super().__init__()
        body = models.resnet34(weights="IMAGENET1K_V1")
        self.features = nn.Sequential(*list(body.children())[:-1], nn.Flatten())
        self.neck = nn.Sequential(nn.Linear(512, dim, bias=False), nn.BatchNorm1d(dim))
        self.ident = nn.Linear(dim, n_ids, bias=False)

    def forward(self, x):
        e = self.neck(self.features(x))
        return e, self.ident(e)


def batch_hard(e, y, margin=0.3):
    e = F.normalize(e.float(), dim=1)
    dist = torch.cdist(e, e)
    same = y[:, None] == y[None]
    eye = torch.eye(len(y), dtype=torch.bool, device=y.device)
    pos = dist.masked_fill(~same | eye, 0).amax(1)
    neg = dist.masked_fill(same, 1e4).amin(1)
    return F.relu(pos - neg + margin).mean()


def gallery(net, loader):
    net.eval()
    feats, ids = [], []
    with torch.no_grad(), torch.autocast("cuda", dtype=AMP):
        for x, y in loader:
            feats.append(F.normalize(net(x.to(device))[0].float(), dim=1))
            ids.append(y)
    return torch.cat(feats), torch.cat(ids).to(device)


def rank1(net, query, ref):
    q, qi = gallery(net, query)
    g, gi = gallery(net, ref)
    net.train()
    return (gi[(q @ g.t()).argmax(1)] == qi).float().mean().item()


class Stepper:
    """Owns optimizers and the loss scaler."""

    def __init__(self, net):
        self.net = net
        self.slow = torch.optim.SGD(net.features.parameters(), lr=0.01, momentum=0.9)
        self.fast = torch.optim.AdamW([*net.neck.parameters(), *net.ident.parameters()], lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    @property
    def both(self):
        return (self.slow, self.fast)

    def __call__(self, loss):
        for o in self.both:
            o.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        for o in self.both:
            self.scaler.unscale_(o)
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        for o in self.both:
            self.scaler.step(o)
        self.scaler.update()


def main():
    torch.backends.cudnn.benchmark = True
    train_ds = FlukeSet("train")
    train = DataLoader(train_ds, batch_sampler=IdentityBatches(train_ds, p=16, k=4), num_workers=8)
    query, ref = DataLoader(FlukeSet("query"), 128), DataLoader(FlukeSet("gallery"), 128)
    net = FlukeNet(train_ds.n_ids).to(device)
    step = Stepper(net)
    scheds = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 60) for o in step.both]
    ident = nn.CrossEntropyLoss(label_smoothing=0.1)
    net.train()
    for epoch in range(60):
        t_sum = i_sum = 0.0
        for x, y in train:
            x, y = x.to(device), y.to(device)
            with torch.autocast("cuda", dtype=AMP):
                e, logits = net(x)
                i_loss = ident(logits, y)
            t_loss = batch_hard(e, y)
            step(t_loss + i_loss)
            t_sum += t_loss.item()
            i_sum += i_loss.item()
        for s in scheds:
            s.step()
        print(f"{epoch} triplet {t_sum / len(train):.4f} id {i_sum / len(train):.4f} rank-1 {rank1(net, query, ref):.4f}")


if __name__ == "__main__":
    main()
