import torch
from torch.nn.utils import clip_grad_norm_


class Trainer:
    def __init__(self, net, loss_fn, lr=1e-3):
        self.net = net
        self.loss_fn = loss_fn
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, batch):
        inputs, targets = batch
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss_fn(self.net(inputs), targets)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        norm = clip_grad_norm_(self.net.parameters(), max_norm=5.0)
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), norm.item()

    def fit(self, loader):
        self.net.train()
        for batch in loader:
            loss, norm = self.step(batch)
            print(loss, norm)
