"""Deterministic policy gradient for a reaching arm."""
import copy

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Ring:
    def __init__(self, cap, o, a):
        self.cap, self.n, self.at = cap, 0, 0
        self.o, self.o2 = np.zeros((cap, o), np.float32), np.zeros((cap, o), np.float32)
        self.a, self.r, self.d = np.zeros((cap, a), np.float32), np.zeros(cap, np.float32), np.zeros(cap, np.float32)

    def put(self, o, a, r, o2, d):
        i = self.at
        self.o[i], self.a[i], self.r[i], self.o2[i], self.d[i] = o, a, r, o2, d
        self.at, self.n = (i + 1) % self.cap, min(self.n + 1, self.cap)

    def get(self, k):
        j = np.random.randint(0, self.n, k)
        return [torch.from_numpy(z[j]).to(device) for z in (self.o, self.a, self.r, self.o2, self.d)]


def net(i, o, last=None):
    layers = [nn.Linear(i, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, o)]
    return nn.Sequential(*layers, *([last] if last else []))


class DDPG:
    def __init__(self, o, a):
        self.mu, self.q = net(o, a, nn.Tanh()).to(device), net(o + a, 1).to(device)
        self.mu_t, self.q_t = copy.deepcopy(self.mu), copy.deepcopy(self.q)
        self.opt_mu = torch.optim.Adam(self.mu.parameters(), lr=1e-4)
        self.opt_q = torch.optim.Adam(self.q.parameters(), lr=1e-3)

    def learn(self, o, a, r, o2, d):
        with torch.no_grad():
            y = r + 0.98 * (1 - d) * self.q_t(torch.cat([o2, self.mu_t(o2)], 1)).squeeze(1)
        q_loss = F.mse_loss(self.q(torch.cat([o, a], 1)).squeeze(1), y)
        self.opt_q.zero_grad()
        q_loss.backward()
        self.opt_q.step()

        act = self.mu(o)
        mu_loss = -self.q(torch.cat([o, act], 1)).mean() + 1e-2 * act.pow(2).mean()
        self.opt_mu.zero_grad()
        self.opt_mu.step()
        self.soft(self.mu_t, self.mu)
        self.soft(self.q_t, self.q)
        return q_loss.item(), mu_loss.item()

    @staticmethod
    @torch.no_grad()
    def soft(t, s, tau=0.005):
        for a, b in zip(t.parameters(), s.parameters()):
            a.lerp_(b, tau)

    @torch.no_grad()
    def act(self, o, noise):
        a = self.mu(torch.as_tensor(o, dtype=torch.float32, device=device)).cpu().numpy()
        return np.clip(a + noise * np.random.randn(*a.shape), -1, 1)


def main(total=200_000, start=5000):
    env = gym.make("Reacher-v4")
    o, _ = env.reset(seed=0)
    agent = DDPG(len(o), env.action_space.shape[0])
    buf = Ring(500_000, len(o), env.action_space.shape[0])
    score, scores = 0.0, []
    for t in range(total):
        a = env.action_space.sample() if t < start else agent.act(o, 0.1)
        o2, r, term, trunc, _ = env.step(a)
        buf.put(o, a, r, o2, float(term))
        score += r
        o = o2
        if term or trunc:
            scores.append(score)
            score, (o, _) = 0.0, env.reset()
        if t >= start:
            ql, ml = agent.learn(*buf.get(256))
            if t % 5000 == 0:
                print(f"{t} q {ql:.4f} mu {ml:.4f} return {np.mean(scores[-20:]):.2f}")


if __name__ == "__main__":
    main()
