import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchvision.models import resnet18


class MoCo(nn.Module):
    """Query encoder, momentum key encoder and a FIFO of negatives."""

    def __init__(self, dim=128, size=4096, m=0.99, temp=0.1):
        super().__init__()
        self.size, self.m, self.temp = size, m, temp
        self.query = resnet18(num_classes=dim)
        self.key = copy.deepcopy(self.query)
        for p in self.key.parameters():
            p.requires_grad = False
        self.register_buffer("bank", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum(self):
        for q, k in zip(self.query.parameters(), self.key.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys):
        b, p = keys.size(0), int(self.ptr)
        self.bank[:, p:p + b] = keys.t()
        self.ptr[0] = (p + b) % self.size

    def forward(self, xq, xk):
        q = F.normalize(self.query(xq), dim=1)
        with torch.no_grad():
            self._momentum()
            perm = torch.randperm(xk.size(0), device=xk.device)
            k = F.normalize(self.key(xk[perm]), dim=1)[perm.argsort()]
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.bank.clone().detach()
        logits = torch.cat([pos, neg], 1) / self.temp
        self._enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


@torch.no_grad()
def knn_accuracy(net, bank_dl, test_dl, device, k=20):
    """Bank features come from the training images on purpose (kNN probe)."""
    net.eval()
    feats, labels = [], []
    for x, y in bank_dl:
        feats.append(F.normalize(net(x.to(device)), dim=1))
        labels.append(y.to(device))
    feats, labels = torch.cat(feats), torch.cat(labels)
    right = count = 0
    for x, y in test_dl:
        sim = F.normalize(net(x.to(device)), dim=1) @ feats.t()
        vote = labels[sim.topk(k, 1).indices].mode(1).values
        right += (vote.cpu() == y).sum().item()
        count += len(y)
    net.train()
    return 100.0 * right / count


def train(pair_loader, memory_loader, test_loader, epochs=200, device="cuda"):
    torch.backends.cudnn.benchmark = True
    model = MoCo().to(device)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        model.train()
        seen, acc_loss = 0, 0.0
        for xq, xk in pair_loader:
            loss = model(xq.to(device), xk.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(xq)
            acc_loss += float(loss) * len(xq)
        scheduler.step()
        if epoch % 5 == 0:
            print(epoch, round(acc_loss / seen, 4), knn_accuracy(model.query, memory_loader, test_loader, device))
    return model


if __name__ == "__main__":
    from data_pairs import get_loaders
    train(*get_loaders(batch=512))
