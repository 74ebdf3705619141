import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal

GAMMA, LAM, CLIP, EPOCHS, HORIZON, MB = 0.99, 0.95, 0.2, 10, 2048, 64


class Policy(nn.Module):
    def __init__(self, o, a):
        super().__init__()
        self.mu = nn.Sequential(nn.Linear(o, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, a))
        self.v = nn.Sequential(nn.Linear(o, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.zeros(a))

    def dist(self, x):
        return Normal(self.mu(x), self.log_std.exp())


def collect(env, pi, obs):
    buf = {k: [] for k in ("o", "a", "lp", "r", "v", "d")}
    for _ in range(HORIZON):
        x = torch.as_tensor(obs, dtype=torch.float32)
        with torch.no_grad():
            dist = pi.dist(x)
            a = dist.sample()
            lp, v = dist.log_prob(a).sum(-1), pi.v(x).squeeze(-1)
        nxt, r, term, trunc, _ = env.step(a.numpy())
        for k, val in zip(buf, (x, a, lp, r, v, float(term or trunc))):
            buf[k].append(val)
        obs = env.reset()[0] if term or trunc else nxt
    with torch.no_grad():
        last = pi.v(torch.as_tensor(obs, dtype=torch.float32)).squeeze(-1).item()
    return obs, buf, last


def gae(buf, last):
    adv, g, nv = np.zeros(HORIZON, np.float32), 0.0, last
    for t in reversed(range(HORIZON)):
        m = 1.0 - buf["d"][t]
        delta = buf["r"][t] + GAMMA * nv * m - buf["v"][t].item()
        g = delta + GAMMA * LAM * m * g
        adv[t], nv = g, buf["v"][t].item()
    adv = torch.from_numpy(adv)
    return adv, adv + torch.stack(buf["v"])


class PPO:
    def __init__(self, env, lr=3e-4):
        self.env = env
        self.pi = Policy(env.observation_space.shape[0], env.action_space.shape[0])
        self.opt = torch.optim.Adam(self.pi.parameters(), lr=lr, eps=1e-5)

    def update(self, buf, adv, ret):
        o, a, lp0 = (torch.stack(buf[k]) for k in ("o", "a", "lp"))
        for _ in range(EPOCHS):
            for idx in torch.randperm(HORIZON).split(MB):
                d = self.pi.dist(o[idx])
                ratio = (d.log_prob(a[idx]).sum(-1) - lp0[idx]).exp()
                A = (adv[idx] - adv[idx].mean()) / (adv[idx].std() + 1e-8)
                surr = torch.min(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)
                vloss = (self.pi.v(o[idx]).squeeze(-1) - ret[idx]).pow(2).mean()
                loss = -surr.mean() + 0.5 * vloss - 0.001 * d.entropy().sum(-1).mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                nn.utils.clip_grad_norm_(self.pi.parameters(), 0.5)
        return loss.item()

    def learn(self, total):
        obs, _ = self.env.reset(seed=0)
        for it in range(total // HORIZON):
            obs, buf, last = collect(self.env, self.pi, obs)
            loss = self.update(buf, *gae(buf, last))
            print(it, f"reward/step {np.mean(buf['r']):.3f} loss {loss:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    PPO(gym.make("HalfCheetah-v4")).learn(1_000_000)
