import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from har import ActivityWindows


class ActivityNet(pl.LightningModule):
    def __init__(self, channels=9, classes=6, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.conv = nn.Sequential(
            nn.Conv1d(channels, 64, 5), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(64, 64, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        h = self.drop(self.conv(x))
        return F.log_softmax(self.fc(h), dim=-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        out = self(x)
        self.log("val/acc", (out.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    pl.seed_everything(3)
    train = DataLoader(ActivityWindows("train"), 64, shuffle=True)
    valid = DataLoader(ActivityWindows("valid"), 256)
    pl.Trainer(max_epochs=30, accelerator="auto").fit(ActivityNet(), train, valid)


if __name__ == "__main__":
    main()
