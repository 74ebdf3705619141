import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from asr_data import Utterances, collate_utts

logger = logging.getLogger("asr")


class ConformerLite(nn.Module):
    def __init__(self, feats=80, dim=256, vocab=500):
        super().__init__()
        self.sub = nn.Conv1d(feats, dim, 5, stride=4, padding=2)
        layer = nn.TransformerEncoderLayer(dim, 4, 1024, dropout=0.1, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 8)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.out(self.enc(self.sub(x.transpose(1, 2)).transpose(1, 2)))


class ASRTrainer:
    def __init__(self, model, lr=3e-4, grad_clip=5.0, device="cuda"):
        self.device = device
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
        self.scaler = torch.cuda.amp.GradScaler()
        self.ctc = nn.CTCLoss(zero_infinity=True)
        self.grad_clip = grad_clip

    def loss(self, feats, targets, flen, tlen):
        with torch.cuda.amp.autocast():
            logits = self.model(feats.to(self.device))
        logp = F.log_softmax(logits.float(), -1).transpose(0, 1)
        return self.ctc(logp, targets.to(self.device), (flen // 4).clamp(max=logp.size(0)), tlen)

    def _limit_gradients(self):
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*batch)
        self.scaler.scale(loss).backward()
        norm = self._limit_gradients()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), norm.item()

    def train_epoch(self, loader, epoch):
        self.model.train()
        for i, batch in enumerate(loader):
            loss, norm = self.step(batch)
            if i % 50 == 0:
                logger.info("epoch %d it %d loss %.3f gnorm %.2f", epoch, i, loss, norm)

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        vals = [self.loss(*b).item() for b in loader]
        return sum(vals) / len(vals)


def main():
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    train = DataLoader(Utterances("train"), 24, shuffle=True, collate_fn=collate_utts, num_workers=4)
    dev = DataLoader(Utterances("dev"), 24, collate_fn=collate_utts)
    trainer = ASRTrainer(ConformerLite())
    best = float("inf")
    for epoch in range(50):
        trainer.train_epoch(train, epoch)
        val = trainer.validate(dev)
        logger.info("epoch %d dev %.4f", epoch, val)
        if val < best:
            best = val
            torch.save(trainer.model.state_dict(), "best_asr.pt")


if __name__ == "__main__":
    main()
