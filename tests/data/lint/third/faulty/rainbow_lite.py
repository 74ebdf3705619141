import random
from collections import deque

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

HP = {
    "gamma": 0.99, "n_step": 3, "batch": 64, "lr": 2.5e-4, "atoms": 51, "vmin": 0.0, "vmax": 200.0,
    "target_every": 500, "max_grad_norm": 1e-9,
    "steps": 60_000, "learn_from": 2000,
}


class C51(nn.Module):
    def __init__(self, obs, act, atoms):
        super().__init__()
        self.act, self.atoms = act, atoms
        self.f = nn.Sequential(nn.Linear(obs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, act * atoms))
        self.register_buffer("z", torch.linspace(HP["vmin"], HP["vmax"], atoms))

    def forward(self, x):
        return self.f(x).view(-1, self.act, self.atoms).log_softmax(-1)

    def q(self, x):
        return (self(x).exp() * self.z).sum(-1)


@torch.no_grad()
def project(target, online, r, s2, d):
    best = online.q(s2).argmax(1)
    p = target(s2).exp()[torch.arange(len(r)), best]
    tz = (r[:, None] + (1 - d[:, None]) * HP["gamma"] ** HP["n_step"] * target.z).clamp(HP["vmin"], HP["vmax"])
    b = (tz - HP["vmin"]) / (HP["vmax"] - HP["vmin"]) * (HP["atoms"] - 1)
    lo, hi = b.floor().long(), b.ceil().long()
    m = torch.zeros_like(p)
    m.scatter_add_(1, lo, p * (hi.float() - b + (lo == hi).float()))
    m.scatter_add_(1, hi, p * (b - lo.float()))
    return m


def learn(online, target, opt, memory):
    s, a, r, s2, d = zip(*random.sample(memory, HP["batch"]))
    s, s2 = (torch.as_tensor(np.array(v), dtype=torch.float32) for v in (s, s2))
    a, r, d = torch.tensor(a), torch.tensor(r, dtype=torch.float32), torch.tensor(d)
    logp = online(s)[torch.arange(len(a)), a]
    loss = -(project(target, online, r, s2, d) * logp).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(online.parameters(), HP["max_grad_norm"])
    opt.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    n_obs, n_act = env.observation_space.shape[0], env.action_space.n
    online, target = C51(n_obs, n_act, HP["atoms"]), C51(n_obs, n_act, HP["atoms"])
    target.load_state_dict(online.state_dict())
    opt = torch.optim.Adam(online.parameters(), lr=HP["lr"])
    memory, window = deque(maxlen=20_000), deque(maxlen=HP["n_step"])
    obs, ret = env.reset(seed=0)[0], 0.0
    for t in range(HP["steps"]):
        eps = max(0.02, 1 - t / 10_000)
        if random.random() < eps:
            a = env.action_space.sample()
        else:
            with torch.no_grad():
                a = online.q(torch.as_tensor(obs, dtype=torch.float32)[None]).argmax(1).item()
        nxt, r, term, trunc, _ = env.step(a)
        window.append((obs, int(a), float(r)))
        ret += r
        if len(window) == HP["n_step"]:
            R = sum(HP["gamma"] ** i * w[2] for i, w in enumerate(window))
            memory.append((window[0][0], window[0][1], R, nxt, float(term)))
        obs = nxt
        if term or trunc:
            if t % 50 == 0:
                print(t, f"return {ret:.0f}")
            obs, ret = env.reset()[0], 0.0
            window.clear()
        if t >= HP["learn_from"]:
            learn(online, target, opt, memory)
        if t % HP["target_every"] == 0:
            target.load_state_dict(online.state_dict())


if __name__ == "__main__":
    main()
