import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from enwik8 import ByteChunks


class Highway(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.h, self.t = nn.Linear(d, d), nn.Linear(d, d)
        nn.init.constant_(self.t.bias, -2.0)

    def forward(self, x):
        g = torch.sigmoid(self.t(x))
        return g * torch.relu(self.h(x)) + (1 - g) * x


class ByteLM(pl.LightningModule):
    def __init__(self, d=640, layers=3, lr=1e-3, epochs=20):
        super().__init__()
        self.save_hyperparameters()
        self.emb = nn.Embedding(256, d)
        self.rnn = nn.LSTM(d, d, layers, dropout=0.2, batch_first=True)
        self.hw = Highway(d)
        self.out = nn.Linear(d, 256)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(self.hw(h))

    def _nll(self, batch):
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, idx):
        loss = self._nll(batch)
        loss = torch.nan_to_num(loss, nan=0.0, posinf=10.0)
        self.log("train_bpc", loss / 0.6931, prog_bar=True)
        return loss

    def validation_step(self, batch, idx):
        self.log("val_bpc", self._nll(batch) / 0.6931, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.hparams.epochs)
        return [opt], [{"scheduler": sched, "interval": "epoch"}]


def main():
    pl.seed_everything(5)
    model = ByteLM()
    train = DataLoader(ByteChunks("train", 257), 64, shuffle=True, num_workers=4)
    val = DataLoader(ByteChunks("valid", 257), 64, num_workers=2)
    trainer = pl.Trainer(max_epochs=20, gradient_clip_val=0.5, precision="bf16-mixed",
                         callbacks=[ModelCheckpoint(monitor="val_bpc", mode="min")])
    trainer.fit(model, train, val)


if __name__ == "__main__":
    main()
