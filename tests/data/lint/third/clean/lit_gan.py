import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, random_split
from torchvision import transforms
from torchvision.datasets import FashionMNIST
from torchvision.utils import make_grid


class FashionData(L.LightningDataModule):
    def __init__(self, root="data", bs=256):
        super().__init__()
        self.root, self.bs = root, bs
        self.tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])

    def setup(self, stage=None):
        full = FashionMNIST(self.root, train=True, download=True, transform=self.tf)
        self.tr, self.va = random_split(full, [55000, 5000], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.tr, self.bs, shuffle=True, num_workers=4)

    def val_dataloader(self):
        return DataLoader(self.va, self.bs, num_workers=4)


class LitHingeGAN(L.LightningModule):
    def __init__(self, latent=100, lr_g=1e-4, lr_d=4e-4, clip=5.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        sn = nn.utils.parametrizations.spectral_norm
        self.gen = nn.Sequential(nn.Linear(latent, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2),
                                 nn.Linear(256, 512), nn.BatchNorm1d(512), nn.LeakyReLU(0.2),
                                 nn.Linear(512, 784), nn.Tanh(), nn.Unflatten(1, (1, 28, 28)))
        self.disc = nn.Sequential(nn.Flatten(), sn(nn.Linear(784, 512)), nn.LeakyReLU(0.2),
                                  sn(nn.Linear(512, 256)), nn.LeakyReLU(0.2), sn(nn.Linear(256, 1)))
        self.register_buffer("probe", torch.randn(16, latent))

    def forward(self, z):
        return self.gen(z)

    def configure_optimizers(self):
        h = self.hparams
        og = torch.optim.Adam(self.gen.parameters(), lr=h.lr_g, betas=(0.0, 0.9))
        od = torch.optim.Adam(self.disc.parameters(), lr=h.lr_d, betas=(0.0, 0.9))
        sg = torch.optim.lr_scheduler.ExponentialLR(og, 0.99)
        sd = torch.optim.lr_scheduler.ExponentialLR(od, 0.99)
        return [og, od], [sg, sd]

    def training_step(self, batch, batch_idx):
        x, _ = batch
        og, od = self.optimizers()
        z = torch.randn(len(x), self.hparams.latent, device=self.device)

        self.toggle_optimizer(od)
        fake = self(z).detach()
        d_loss = F.relu(1 - self.disc(x)).mean() + F.relu(1 + self.disc(fake)).mean()
        od.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(od, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        od.step()
        self.untoggle_optimizer(od)

        self.toggle_optimizer(og)
        g_loss = -self.disc(self(z)).mean()
        og.zero_grad()
        self.manual_backward(g_loss)
        og.step()
        self.untoggle_optimizer(og)
        self.log_dict({"d": d_loss, "g": g_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val/real_score", self.disc(x).mean())

    def on_validation_epoch_end(self):
        if self.logger is not None:
            self.logger.experiment.add_image("fake", make_grid(self(self.probe), normalize=True), self.current_epoch)


if __name__ == "__main__":
    L.seed_everything(5)
    L.Trainer(max_epochs=50, accelerator="auto").fit(LitHingeGAN(), FashionData())
