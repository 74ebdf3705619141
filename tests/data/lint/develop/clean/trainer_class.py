import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, CosineAnnealingLR


@dataclass
class Options:
    lr: float = 1e-3
    warmup: int = 2000
    steps: int = 50_000
    max_norm: float = 1.0
    folder: str = "runs"


class Trainer:
    def __init__(self, model: nn.Module, options: Options):
        self.model = model
        self.o = options
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        warm = LinearLR(self.optimizer, start_factor=1e-3, total_iters=options.warmup)
        rest = CosineAnnealingLR(self.optimizer, T_max=options.steps - options.warmup)
        self.scheduler = SequentialLR(self.optimizer, [warm, rest], milestones=[options.warmup])
        self.step = 0

    def fit(self, train_loader, val_loader):
        while self.step < self.o.steps:
            self._train_epoch(train_loader)
            val = self._validate(val_loader)
            self._save(val)

    def _train_epoch(self, loader):
        self.model.train()
        for batch in loader:
            loss = self._compute_loss(batch)
            self._backward_and_step(loss)
            self.step += 1

    def _compute_loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def _backward_and_step(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.o.max_norm)
        if torch.isfinite(norm):
            self.optimizer.step()
            self.scheduler.step()

    @torch.inference_mode()
    def _validate(self, loader):
        self.model.eval()
        total, count = 0.0, 0
        for batch in loader:
            total += self._compute_loss(batch).item()
            count += 1
        return total / max(count, 1)

    def _save(self, val):
        path = os.path.join(self.o.folder, f"{self.step}.pt")
        torch.save({"model": self.model.state_dict(), "opt": self.optimizer.state_dict(), "val": val}, path)
