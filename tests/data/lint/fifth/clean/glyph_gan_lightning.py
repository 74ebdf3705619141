import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import spectral_norm as sn
from torch.utils.data import DataLoader

from fontdata import GlyphFolder


class GlyphGenerator(nn.Module):
    def __init__(self, z, n_letters):
        super().__init__()
        self.letter = nn.Embedding(n_letters, 32)
        self.net = nn.Sequential(
            nn.ConvTranspose2d(z + 32, 256, 4), nn.BatchNorm2d(256), nn.ReLU(),
            nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU(),
            nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 1, 4, 2, 1), nn.Sigmoid())

    def forward(self, z, letter):
        return self.net(torch.cat([z, self.letter(letter)], 1)[..., None, None])


class GlyphCritic(nn.Module):
    def __init__(self, n_letters):
        super().__init__()
        self.conv = nn.Sequential(
            sn(nn.Conv2d(1, 64, 4, 2, 1)), nn.LeakyReLU(0.2), sn(nn.Conv2d(64, 128, 4, 2, 1)), nn.LeakyReLU(0.2),
            sn(nn.Conv2d(128, 256, 4, 2, 1)), nn.LeakyReLU(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.lin = sn(nn.Linear(256, 1))
        self.proj = nn.Embedding(n_letters, 256)

    def forward(self, x, letter):
        f = self.conv(x)
        return self.lin(f).squeeze(1) + (f * self.proj(letter)).sum(1)


class GlyphGAN(pl.LightningModule):
    def __init__(self, z=100, n_letters=26, lr_g=1e-4, lr_d=4e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.G = GlyphGenerator(z, n_letters)
        self.D = GlyphCritic(n_letters)

    def training_step(self, batch, idx):
        real, letter = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(real.size(0), self.hparams.z, device=self.device)

        self.toggle_optimizer(opt_d)
        fake = self.G(z, letter).detach()
        d_loss = F.relu(1 - self.D(real, letter)).mean() + F.relu(1 + self.D(fake, letter)).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        g_loss = -self.D(self.G(z, letter), letter).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"d": d_loss.detach(), "g": g_loss.detach()}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def configure_optimizers(self):
        g = torch.optim.Adam(self.G.parameters(), lr=self.hparams.lr_g, betas=(0.0, 0.9))
        d = torch.optim.Adam(self.D.parameters(), lr=self.hparams.lr_d, betas=(0.0, 0.9))
        sched = [torch.optim.lr_scheduler.ExponentialLR(o, 0.99) for o in (g, d)]
        return [g, d], sched


if __name__ == "__main__":
    pl.seed_everything(0)
    loader = DataLoader(GlyphFolder("fonts/"), batch_size=128, shuffle=True, num_workers=4, drop_last=True)
    pl.Trainer(max_epochs=120, accelerator="auto", devices=1).fit(GlyphGAN(), loader)
