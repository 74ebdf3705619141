# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import make_swiss_roll

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.tensor(make_swiss_roll(20000, noise=0.4)[0][:, [0, 2]] / 10, dtype=torch.float32)
sigmas = torch.logspace(0, -2, 10, device=device)

# %%
class ScoreNet(nn.Module):
    def __init__(self, h=128):
        super().__init__()
        self.emb = nn.Embedding(len(sigmas), h)
        self.l1, self.l2, self.l3 = nn.Linear(2, h), nn.Linear(h, h), nn.Linear(h, 2)
        self.act = nn.Softplus()

    def forward(self, x, k):
        h = self.act(self.l1(x) + self.emb(k))
        h = self.act(self.l2(h) + self.emb(k))
        return self.l3(h) / sigmas[k][:, None]


def dsm_loss(net, x):
    k = torch.randint(0, len(sigmas), (len(x),), device=x.device)
    s = sigmas[k][:, None]
    noise = torch.randn_like(x)
    score = net(x + s * noise, k)
    return 0.5 * ((score * s + noise) ** 2).sum(1).mean()


# %%
net = ScoreNet().to(device)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200)
history = []
for epoch in range(200):
    losses = []
    for xb in data[torch.randperm(len(data))].split(512):
        loss = dsm_loss(net, xb.to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss)
    sched.step()
    history.append(torch.stack(losses).mean().item())
    if epoch % 20 == 0:
        print(epoch, history[-1])

# %%
@torch.no_grad()
def langevin(net, n=2000, steps=100, eps=2e-5):
    x = torch.rand(n, 2, device=device) * 4 - 2
    for i, s in enumerate(sigmas):
        a = eps * (s / sigmas[-1]) ** 2
        k = torch.full((n,), i, device=device, dtype=torch.long)
        for _ in range(steps):
            x = x + 0.5 * a * net(x, k) + a.sqrt() * torch.randn_like(x)
    return x.cpu()


net.eval()
pts = langevin(net)
fig, ax = plt.subplots(1, 2, figsize=(9, 4))
ax[0].scatter(*data[:2000].T, s=2)
ax[1].scatter(*pts.T, s=2)
fig.savefig("swiss.png")
np.save("history.npy", np.array(history))
