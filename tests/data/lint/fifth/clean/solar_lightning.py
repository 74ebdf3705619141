"""Day-ahead solar farm output with a temporal conv net in Lightning."""
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from pvdata import FarmWindows


class CausalBlock(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(c, c, 3, dilation=dilation)
        self.norm = nn.BatchNorm1d(c)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.conv(F.pad(x, (self.pad, 0)))
        return x + self.drop(F.relu(self.norm(y)))


class SolarTCN(L.LightningModule):
    QUANTILES = (0.1, 0.5, 0.9)

    def __init__(self, n_in=9, channels=64, horizon=24, lr=1e-3, max_epochs=80):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv1d(n_in, channels, 1)
        self.blocks = nn.Sequential(*[CausalBlock(channels, 2 ** i) for i in range(6)])
        self.head = nn.Linear(channels, horizon * len(self.QUANTILES))

    def forward(self, x):
        h = self.blocks(self.stem(x))[..., -1]
        return self.head(h).view(x.size(0), self.hparams.horizon, len(self.QUANTILES))

    def pinball(self, pred, y):
        q = torch.tensor(self.QUANTILES, device=y.device)
        e = y.unsqueeze(-1) - pred
        return torch.maximum(q * e, (q - 1) * e).mean()

    def training_step(self, batch, _):
        x, y = batch
        loss = self.pinball(self(x), y)
        self.log("train/pinball", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        pred = self(x)
        self.log("val/pinball", self.pinball(pred, y), prog_bar=True)
        inside = (y >= pred[..., 0]) & (y <= pred[..., 2])
        self.log("val/coverage", inside.float().mean())

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.hparams.max_epochs)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "epoch"}}


def main():
    L.seed_everything(8, workers=True)
    train = DataLoader(FarmWindows("farms.parquet", years=(2015, 2020)), 256, shuffle=True, num_workers=4)
    val = DataLoader(FarmWindows("farms.parquet", years=(2021, 2021)), 512, num_workers=4)
    model = SolarTCN()
    trainer = L.Trainer(
        max_epochs=80,
        gradient_clip_val=1.0,
        precision="bf16-mixed",
        callbacks=[EarlyStopping("val/pinball", patience=10), ModelCheckpoint(monitor="val/pinball", save_top_k=1)],
    )
    trainer.fit(model, train, val)


if __name__ == "__main__":
    main()
