import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes[:-2], sizes[1:-1]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    layers.append(nn.Linear(sizes[-2], sizes[-1]))
    return nn.Sequential(*layers)


class ManualGAN(pl.LightningModule):
    def __init__(self, latent=64, data_dim=784):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = mlp(latent, 256, 512, data_dim)
        self.critic = mlp(data_dim, 512, 256, 1)

    def sample(self, n):
        return torch.tanh(self.generator(torch.randn(n, self.latent, device=self.device)))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        real = real.flatten(1)
        opt_g, opt_d = self.optimizers()

        fake = self.sample(real.size(0))
        real_score = self.critic(real)
        fake_score = self.critic(fake.detach())
        d_loss = (F.binary_cross_entropy_with_logits(real_score, torch.ones_like(real_score))
                  + F.binary_cross_entropy_with_logits(fake_score, torch.zeros_like(fake_score)))
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()

        self.toggle_optimizer(opt_g)
        score = self.critic(self.sample(real.size(0)))
        g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
        return g, d
