"""Soft actor-critic with automatic temperature."""
import copy
from collections import deque
import random

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mlp(i, o, h=256):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Policy(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.net = mlp(obs, 2 * act)

    def forward(self, s):
        mu, ls = self.net(s).chunk(2, -1)
        dist = torch.distributions.Normal(mu, ls.clamp(-5, 2).exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = (dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1)
        return a, logp, torch.tanh(mu)


class Twin(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.a, self.b = mlp(obs + act, 1), mlp(obs + act, 1)

    def forward(self, s, u):
        x = torch.cat([s, u], -1)
        return self.a(x).squeeze(-1), self.b(x).squeeze(-1)


class SAC:
    def __init__(self, obs, act, gamma=0.99, tau=0.005):
        self.pi, self.q = Policy(obs, act).to(device), Twin(obs, act).to(device)
        self.q_targ = copy.deepcopy(self.q).requires_grad_(False)
        self.log_alpha = torch.zeros((), device=device, requires_grad=True)
        self.target_entropy, self.gamma, self.tau = -float(act), gamma, tau
        self.optims = dict(
            pi=torch.optim.Adam(self.pi.parameters(), lr=3e-4),
            q=torch.optim.Adam(self.q.parameters(), lr=3e-4),
            alpha=torch.optim.Adam([self.log_alpha], lr=3e-4),
        )

    def _descend(self, which, loss):
        o = self.optims[which]
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.item()

    def update(self, s, a, r, s2, done):
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            a2, lp2, _ = self.pi(s2)
            target = r + self.gamma * (1 - done) * (torch.min(*self.q_targ(s2, a2)) - alpha * lp2)
        q1, q2 = self.q(s, a)
        out = {"q": self._descend("q", F.mse_loss(q1, target) + F.mse_loss(q2, target))}
        for p in self.q.parameters():
            p.requires_grad = False
        new_a, lp, _ = self.pi(s)
        out["pi"] = self._descend("pi", (alpha * lp - torch.min(*self.q(s, new_a))).mean())
        for p in self.q.parameters():
            p.requires_grad = True
        out["alpha"] = self._descend("alpha", -(self.log_alpha * (lp.detach() + self.target_entropy)).mean())
        with torch.no_grad():
            for t, p in zip(self.q_targ.parameters(), self.q.parameters()):
                t.mul_(1 - self.tau).add_(self.tau * p)
        return out

    @torch.no_grad()
    def act(self, s, greedy=False):
        a, _, mean = self.pi(torch.as_tensor(s, dtype=torch.float32, device=device))
        return (mean if greedy else a).cpu().numpy()


def batch(buf, n=256):
    cols = zip(*random.sample(buf, n))
    return [torch.as_tensor(np.stack(c), dtype=torch.float32, device=device) for c in cols]


if __name__ == "__main__":
    env = gym.make("Hopper-v4")
    agent = SAC(env.observation_space.shape[0], env.action_space.shape[0])
    buf = deque(maxlen=1_000_000)
    s, _ = env.reset(seed=1)
    ret, returns = 0.0, []
    for t in range(500_000):
        a = env.action_space.sample() if t < 10_000 else agent.act(s)
        s2, r, term, trunc, _ = env.step(a)
        buf.append((s, a, np.float32(r), s2, np.float32(term)))
        ret += r
        s = s2
        if term or trunc:
            returns.append(ret)
            s, _ = env.reset()
            ret = 0.0
        if t >= 10_000:
            info = agent.update(*batch(buf))
            if t % 5000 == 0:
                print(t, info, "return", np.mean(returns[-10:]))
