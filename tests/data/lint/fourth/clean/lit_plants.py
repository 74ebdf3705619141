import lightning as L
import torch
import torch.nn as nn
import torchvision
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, random_split
from torchvision import transforms as T
from torchvision.datasets import ImageFolder


class PlantData(L.LightningDataModule):
    def __init__(self, root, batch_size=64):
        super().__init__()
        self.root, self.batch_size = root, batch_size

    def setup(self, stage=None):
        tf = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
        full = ImageFolder(self.root, tf)
        n = int(0.85 * len(full))
        self.tr, self.va = random_split(full, [n, len(full) - n], torch.Generator().manual_seed(7))

    def train_dataloader(self):
        return DataLoader(self.tr, self.batch_size, shuffle=True, num_workers=6)

    def val_dataloader(self):
        return DataLoader(self.va, self.batch_size, num_workers=6)


class PlantModel(L.LightningModule):
    def __init__(self, classes, lr=3e-4, head_lr=1e-3, wd=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.net = torchvision.models.efficientnet_b0(weights="DEFAULT")
        self.net.classifier[1] = nn.Linear(self.net.classifier[1].in_features, classes)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, idx):
        x, y = batch
        logits = self(x)
        conf = logits.softmax(1).max(1).values
        self.log_dict({"val/loss": self.criterion(logits, y), "val/conf": conf.mean(),
                       "val/acc": (logits.argmax(1) == y).float().mean()}, prog_bar=True)

    def configure_optimizers(self):
        hp = self.hparams
        groups = {"decay": [], "plain": [], "head": []}
        for name, p in self.net.named_parameters():
            if name.startswith("classifier"):
                groups["head"].append(p)
            else:
                groups["plain" if p.ndim == 1 else "decay"].append(p)
        opt = torch.optim.AdamW([
            {"params": groups["decay"], "weight_decay": hp.wd},
            {"params": groups["plain"], "weight_decay": 0.0},
            {"params": groups["head"], "lr": hp.head_lr, "weight_decay": 0.0},
        ], lr=hp.lr)
        sch = torch.optim.lr_scheduler.CosineAnnealingLR(opt, self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sch, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(7)
    dm = PlantData("data/plants")
    trainer = L.Trainer(
        max_epochs=30, precision="16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2,
        callbacks=[EarlyStopping("val/loss", patience=5), ModelCheckpoint(monitor="val/acc", mode="max"), LearningRateMonitor("step")])
    trainer.fit(PlantModel(classes=38), dm)
