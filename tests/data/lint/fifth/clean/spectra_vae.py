# %% [markdown]
# Variational autoencoder for stellar spectra (exported from a notebook)

# %%
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

device = "cuda" if torch.cuda.is_available() else "cpu"
flux = torch.from_numpy(np.load("apogee_flux.npy")).float()
flux = (flux - flux.mean(1, keepdim=True)) / flux.std(1, keepdim=True)
full = TensorDataset(flux)
n_val = len(full) // 10
train_ds, val_ds = random_split(full, [len(full) - n_val, n_val], generator=torch.Generator().manual_seed(4))
train_dl = DataLoader(train_ds, batch_size=256, shuffle=True, drop_last=True)
val_dl = DataLoader(val_ds, batch_size=1024)


# %%
class SpectrumVAE(nn.Module):
    def __init__(self, n_pix, latent=10):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(n_pix, 1024), nn.LayerNorm(1024), nn.SiLU(), nn.Linear(1024, 256), nn.SiLU())
        self.mu, self.lv = nn.Linear(256, latent), nn.Linear(256, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 256), nn.SiLU(), nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, n_pix))

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.lv(h).clamp(-8, 8)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp() if self.training else mu
        return self.dec(z), mu, lv


def elbo_terms(out, x):
    rec, mu, lv = out
    mse = F.mse_loss(rec, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(1).mean()
    return mse, kl


# %%
vae = SpectrumVAE(flux.shape[1]).to(device)
opt = torch.optim.Adam(vae.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[60, 90], gamma=0.2)
history = {"mse": [], "kl": [], "val": []}

for epoch in range(110):
    beta = min(1.0, epoch / 20)
    vae.train()
    tot_mse, tot_kl = 0.0, 0.0
    for (x,) in train_dl:
        x = x.to(device)
        mse, kl = elbo_terms(vae(x), x)
        loss = mse + beta * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot_mse += mse.item()
        tot_kl += kl.item()
    sched.step()

    vae.eval()
    with torch.no_grad():
        val = np.mean([sum(elbo_terms(vae(x.to(device)), x.to(device))).item() for (x,) in val_dl])
    history["mse"].append(tot_mse / len(train_dl))
    history["kl"].append(tot_kl / len(train_dl))
    history["val"].append(val)
    print(f"{epoch:3d} beta={beta:.2f} mse={history['mse'][-1]:.2f} kl={history['kl'][-1]:.2f} val={val:.2f}")

# %%
with torch.no_grad():
    codes = torch.cat([vae.mu(vae.enc(x.to(device))).cpu() for (x,) in val_dl])
np.save("latent_codes.npy", codes.numpy())
torch.save(vae.state_dict(), "spectrum_vae.pt")
