import dataclasses
import logging
from pathlib import Path

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

log = logging.getLogger(__name__)


@dataclasses.dataclass
class TrainConfig:
    epochs: int = 15
    lr: float = 1e-3
    max_norm: float = 1.0
    accumulate: int = 2
    patience: int = 3
    out: Path = Path("runs/tagger")


class BiLSTMTagger(nn.Module):
    def __init__(self, vocab, tags, dim=128, hidden=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden // 2, bidirectional=True, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(hidden, tags)

    def forward(self, ids):
        h, _ = self.lstm(self.emb(ids))
        return self.out(self.drop(h))


class Trainer:
    def __init__(self, model, train_loader, dev_loader, cfg=TrainConfig(), device="cuda"):
        self.model = model.to(device)
        self.train_loader, self.dev_loader = train_loader, dev_loader
        self.cfg, self.device = cfg, device
        self.loss_fn = nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, mode="max", patience=1)
        self.scaler = GradScaler()
        self.best, self.bad = -1.0, 0

    def _forward_loss(self, ids, tags):
        with autocast():
            logits = self.model(ids)
            return self.loss_fn(logits.flatten(0, 1), tags.flatten())

    def _clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)

    def _apply_gradients(self):
        self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def train_epoch(self):
        self.model.train()
        total, n = 0.0, len(self.train_loader)
        for i, (ids, tags) in enumerate(self.train_loader, start=1):
            loss = self._forward_loss(ids.to(self.device), tags.to(self.device))
            self.scaler.scale(loss / self.cfg.accumulate).backward()
            total += loss.item()
            if i % self.cfg.accumulate == 0 or i == n:
                self._apply_gradients()
        return total / n

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        good = seen = 0
        for ids, tags in self.dev_loader:
            tags = tags.to(self.device)
            pred = self.model(ids.to(self.device)).argmax(-1)
            keep = tags != -100
            good += (pred[keep] == tags[keep]).sum().item()
            seen += keep.sum().item()
        return good / max(seen, 1)

    def fit(self):
        self.cfg.out.mkdir(parents=True, exist_ok=True)
        for epoch in range(self.cfg.epochs):
            loss = self.train_epoch()
            acc = self.accuracy()
            self.scheduler.step(acc)
            log.info("epoch %d loss %.4f dev acc %.4f", epoch, loss, acc)
            if acc > self.best:
                self.best, self.bad = acc, 0
                torch.save(self.model.state_dict(), self.cfg.out / "best.pt")
            else:
                self.bad += 1
                if self.bad >= self.cfg.patience:
                    log.info("stopping early")
                    break
        return self.best
