import torch
import torch.nn.functional as F
from torch import nn


class TwoTower(nn.Module):
    def __init__(self, image, text):
        super().__init__()
        self.image, self.text = image, text
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.659)

    def forward(self, images, tokens):
        i = F.normalize(self.image(images), dim=-1)
        t = F.normalize(self.text(tokens), dim=-1)
        return self.logit_scale.exp() * i @ t.T


def clip_loss(logits):
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def train(model, loader, optimizer, scheduler, scaler):
    model.train()
    for images, tokens in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(images, tokens)
        loss = clip_loss(logits.float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
