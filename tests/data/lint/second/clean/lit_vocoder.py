import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from vocoder_data import PairedMelWav


class Upsampler(nn.Module):
    def __init__(self, mel=80, base=256, rates=(8, 8, 4)):
        super().__init__()
        self.pre = nn.Conv1d(mel, base, 7, padding=3)
        ups, c = [], base
        for r in rates:
            ups += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(c, c // 2, 2 * r, r, r // 2)]
            c //= 2
        self.ups = nn.Sequential(*ups)
        self.post = nn.Conv1d(c, 1, 7, padding=3)

    def forward(self, m):
        return torch.tanh(self.post(F.leaky_relu(self.ups(self.pre(m)))))


class ScaleDisc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 32, 15, 1, 7), nn.LeakyReLU(0.1), nn.Conv1d(32, 64, 41, 4, 20, groups=4),
                                 nn.LeakyReLU(0.1), nn.Conv1d(64, 128, 41, 4, 20, groups=16), nn.LeakyReLU(0.1),
                                 nn.Conv1d(128, 1, 3, 1, 1))

    def forward(self, x):
        return self.net(x)


class LitVocoder(L.LightningModule):
    def __init__(self, lr=2e-4, lambda_l1=45.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen, self.disc = Upsampler(), ScaleDisc()

    def configure_optimizers(self):
        kw = dict(lr=self.hparams.lr, betas=(0.8, 0.99))
        og = torch.optim.AdamW(self.gen.parameters(), **kw)
        od = torch.optim.AdamW(self.disc.parameters(), **kw)
        sg = torch.optim.lr_scheduler.ExponentialLR(og, 0.999)
        sd = torch.optim.lr_scheduler.ExponentialLR(od, 0.999)
        return [og, od], [sg, sd]

    def training_step(self, batch, batch_idx):
        mel, wav = batch
        opt_g, opt_d = self.optimizers()
        fake = self.gen(mel)

        self.toggle_optimizer(opt_d)
        real_s, fake_s = self.disc(wav), self.disc(fake.detach())
        d_loss = (real_s - 1).pow(2).mean() + fake_s.pow(2).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=10.0, gradient_clip_algorithm="norm")
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        adv = (self.disc(fake) - 1).pow(2).mean()
        rec = F.l1_loss(fake, wav)
        g_loss = adv + self.hparams.lambda_l1 * rec
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=10.0, gradient_clip_algorithm="norm")
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"g": g_loss, "d": d_loss, "rec": rec}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def validation_step(self, batch, batch_idx):
        mel, wav = batch
        self.log("val_l1", F.l1_loss(self.gen(mel), wav), prog_bar=True)


if __name__ == "__main__":
    L.seed_everything(1234)
    train = DataLoader(PairedMelWav("train"), 16, shuffle=True, num_workers=4)
    val = DataLoader(PairedMelWav("val"), 16, num_workers=4)
    L.Trainer(max_epochs=400, accelerator="auto").fit(LitVocoder(), train, val)
