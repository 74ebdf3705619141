import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint


class LanguageModel(pl.LightningModule):
    def __init__(self, backbone, lr=3e-4, warmup=2000, total=100_000):
        super().__init__()
        self.backbone, self.lr, self.warmup, self.total = backbone, lr, warmup, total
        self.outputs = []

    def _loss(self, batch):
        logits = self.backbone(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, _):
        loss = self._loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.outputs.append(self._loss(batch))

    def on_validation_epoch_end(self):
        self.log("val/loss", torch.stack(self.outputs).mean())
        self.outputs.clear()

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / self.warmup, 1.0))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


pl.seed_everything(1)
trainer = pl.Trainer(
    max_steps=100_000,
    accumulate_grad_batches=8,
    gradient_clip_val=1.0,
    precision="16-mixed",
    callbacks=[ModelCheckpoint(monitor="val/loss"), LearningRateMonitor("step")],
)
trainer.fit(LanguageModel(make_backbone()), train_loader, val_loader)
