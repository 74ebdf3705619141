import argparse

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from sequences import ItemSequences


class SASRec(pl.LightningModule):
    def __init__(self, n_items, max_len=100, d=64, heads=2, depth=2, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.item = nn.Embedding(n_items + 1, d, padding_idx=0)
        self.pos = nn.Embedding(max_len, d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, 0.2, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth)
        self.norm = nn.LayerNorm(d)

    def forward(self, seq):
        t = seq.size(1)
        causal = torch.triu(torch.ones(t, t, dtype=torch.bool, device=seq.device), 1)
        h = self.item(seq) * self.hparams.d ** 0.5 + self.pos(torch.arange(t, device=seq.device))
        return self.norm(self.body(h, mask=causal))

    def pair_scores(self, seq, pos, neg):
        h = self(seq)
        return (h * self.item(pos)).sum(-1), (h * self.item(neg)).sum(-1)

    def training_step(self, batch, _):
        seq, pos, neg = batch
        sp, sn = self.pair_scores(seq, pos, neg)
        keep = pos > 0
        loss = F.binary_cross_entropy_with_logits(sp[keep], torch.ones_like(sp[keep]))
        loss = loss + F.binary_cross_entropy_with_logits(sn[keep], torch.zeros_like(sn[keep]))
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def _ndcg(self, batch):
        seq, target = batch
        scores = self(seq)[:, -1] @ self.item.weight.t()
        scores.scatter_(1, seq, float("-inf"))
        rank = (scores > scores.gather(1, target[:, None])).sum(1).float()
        return torch.where(rank < 10, 1 / torch.log2(rank + 2), torch.zeros_like(rank)).mean()

    def validation_step(self, batch, _, dataloader_idx=0):
        name = ("val_ndcg", "fit_ndcg")[dataloader_idx]
        self.log(name, self._ndcg(batch), prog_bar=True, add_dataloader_idx=False)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98))
        warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 500))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": warm, "interval": "step"}}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="ml-1m.txt")
    ap.add_argument("--epochs", type=int, default=200)
    args = ap.parse_args()
    pl.seed_everything(23)
    train = ItemSequences(args.data, "train")
    loaders = [
        DataLoader(ItemSequences(args.data, "valid"), 512),
        DataLoader(ItemSequences(args.data, "train_last"), 512),
    ]
    trainer = pl.Trainer(
        max_epochs=args.epochs, gradient_clip_val=5.0, precision="16-mixed", devices=1,
        callbacks=[EarlyStopping("val_ndcg", mode="max", patience=10),
                   ModelCheckpoint(monitor="val_ndcg", mode="max"), LearningRateMonitor()])
    trainer.fit(SASRec(train.n_items), DataLoader(train, 256, shuffle=True, num_workers=4), loaders)


if __name__ == "__main__":
    main()
