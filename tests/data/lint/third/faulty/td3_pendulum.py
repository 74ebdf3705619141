import copy

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def net(i, o, final=None):
    m = [nn.Linear(i, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, o)]
    return nn.Sequential(*m, *([final] if final else []))


class Memory:
    def __init__(self, n, dims):
        self.data, self.n, self.k = [np.zeros((n, d), np.float32) for d in dims], n, 0

    def add(self, *xs):
        for arr, x in zip(self.data, xs):
            arr[self.k % self.n] = x
        self.k += 1

    def sample(self, b):
        idx = np.random.randint(0, min(self.k, self.n), b)
        return [torch.from_numpy(a[idx]) for a in self.data]


class TD3:
    def __init__(self, o, a, limit, gamma=0.99, tau=0.005, delay=2):
        self.actor, self.q1, self.q2 = net(o, a, nn.Tanh()), net(o + a, 1), net(o + a, 1)
        self.t_actor, self.t_q1, self.t_q2 = map(copy.deepcopy, (self.actor, self.q1, self.q2))
        self.opts = {"actor": torch.optim.Adam(self.actor.parameters(), lr=3e-4),
                     "critic": torch.optim.Adam([*self.q1.parameters(), *self.q2.parameters()], lr=3e-4)}
        self.limit, self.gamma, self.tau, self.delay, self.it = limit, gamma, tau, delay, 0

    @torch.no_grad()
    def act(self, obs, noise=0.1):
        a = self.actor(torch.as_tensor(obs, dtype=torch.float32))
        return (a + noise * torch.randn_like(a)).clamp(-1, 1).numpy() * self.limit

    def targets(self, r, s2, d):
        with torch.no_grad():
            a2 = self.t_actor(s2)
            a2 = (a2 + (0.2 * torch.randn_like(a2)).clamp(-0.5, 0.5)).clamp(-1, 1)
            x = torch.cat([s2, a2], 1)
            return r + self.gamma * (1 - d) * torch.min(self.t_q1(x), self.t_q2(x))

    def update(self, batch):
        s, a, r, s2, d = batch
        self.it += 1
        y = self.targets(r, s2, d)
        x = torch.cat([s, a], 1)
        critic_loss = F.mse_loss(self.q1(x), y) + F.mse_loss(self.q2(x), y)
        self.opts["critic"].zero_grad()
        critic_loss.backward()
        self.opts["critic"].step()
        if self.it % self.delay == 0:
            actor_loss = -self.q1(torch.cat([s, self.actor(s)], 1)).mean()
            self.opts["actor"].zero_grad()
            self.opts["actor"].step()
            self.last_actor = actor_loss.item()
            self.polyak()
        return critic_loss.item()

    @torch.no_grad()
    def polyak(self):
        for src, dst in ((self.actor, self.t_actor), (self.q1, self.t_q1), (self.q2, self.t_q2)):
            for p, t in zip(src.parameters(), dst.parameters()):
                t.lerp_(p, self.tau)


def main(steps=30_000, start=1000):
    torch.manual_seed(0)
    env = gym.make("Pendulum-v1")
    o, a = env.observation_space.shape[0], env.action_space.shape[0]
    lim = float(env.action_space.high[0])
    agent, mem = TD3(o, a, lim), Memory(100_000, (o, a, 1, o, 1))
    obs, ret = env.reset(seed=0)[0], 0.0
    for t in range(steps):
        act = env.action_space.sample() if t < start else agent.act(obs)
        nxt, r, term, trunc, _ = env.step(act)
        mem.add(obs, act / lim, r, nxt, float(term))
        obs, ret = nxt, ret + r
        if t >= start:
            loss = agent.update(mem.sample(256))
        if term or trunc:
            print(t, f"return {ret:.1f}")
            obs, ret = env.reset()[0], 0.0


if __name__ == "__main__":
    main()
