import copy

import torch
import torch.nn.functional as F


class BYOL(torch.nn.Module):
    def __init__(self, backbone, projector, predictor, tau=0.996):
        super().__init__()
        self.online = torch.nn.Sequential(backbone, projector)
        self.target = copy.deepcopy(self.online)
        self.predictor = predictor
        self.tau = tau
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def update_target(self):
        for o, t in zip(self.online.parameters(), self.target.parameters()):
            t.mul_(self.tau).add_(o, alpha=1 - self.tau)

    def forward(self, a, b):
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ta, tb = self.target(a), self.target(b)
        return 2 - F.cosine_similarity(pa, tb.detach()).mean() - F.cosine_similarity(pb, ta.detach()).mean()


def pretrain(model, loader, epochs):
    params = [*model.online.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=1.5e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for epoch in range(epochs):
        for (a, b), _ in loader:
            loss = model(a.cuda(), b.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.update_target()
            schedule.step()
