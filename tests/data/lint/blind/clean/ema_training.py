import copy

import torch
import torch.nn.functional as F
from torchvision.models import mobilenet_v3_small

from loaders import get_train, get_valid


class EMA:
    def __init__(self, model, decay=0.9995):
        self.shadow = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)
        for s, b in zip(self.shadow.buffers(), model.buffers()):
            s.copy_(b)


@torch.no_grad()
def score(model, loader):
    model.eval()
    good = n = 0
    for x, y in loader:
        good += (model(x.cuda()).argmax(-1).cpu() == y).sum().item()
        n += y.shape[0]
    return good / n


def fit(epochs=40):
    model = mobilenet_v3_small(num_classes=200).cuda()
    ema = EMA(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, momentum=0.9, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.97)
    train, valid = get_train(), get_valid()
    for ep in range(epochs):
        model.train()
        for x, y in train:
            opt.zero_grad()
            loss = F.cross_entropy(model(x.cuda()), y.cuda(), label_smoothing=0.1)
            loss.backward()
            opt.step()
            ema.update(model)
        sched.step()
        print(f"epoch {ep}: raw {score(model, valid):.4f} ema {score(ema.shadow, valid):.4f}")
    torch.save(ema.shadow.state_dict(), "ema.pt")


if __name__ == "__main__":
    fit()
