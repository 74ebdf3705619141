import pytorch_lightning as pl
import torch
from torch import nn


class GANModule(pl.LightningModule):
    def __init__(self, generator, discriminator, latent_dim=64):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = generator, discriminator
        self.latent_dim = latent_dim
        self.bce = nn.BCEWithLogitsLoss()

    def training_step(self, batch, batch_idx):
        real, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(real.size(0), self.latent_dim, device=self.device)

        self.toggle_optimizer(opt_g)
        fake = self.generator(z)
        g_loss = self.bce(self.discriminator(fake), torch.ones(real.size(0), 1, device=self.device))
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real_loss = self.bce(self.discriminator(real), torch.ones(real.size(0), 1, device=self.device))
        fake_loss = self.bce(self.discriminator(fake.detach()), torch.zeros(real.size(0), 1, device=self.device))
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.99) for o in (g, d)]
        return [g, d], schedulers
