import argparse
import copy
import random
from collections import namedtuple, deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn, optim

Tr = namedtuple("Tr", "s a r s2 d")


class Dueling(nn.Module):
    def __init__(self, n_s, n_a):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(n_s, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.v, self.a = nn.Linear(128, 1), nn.Linear(128, n_a)

    def forward(self, s):
        h = self.f(s)
        adv = self.a(h)
        return self.v(h) + adv - adv.mean(-1, keepdim=True)


class Agent:
    def __init__(self, n_s, n_a, opts):
        self.online = Dueling(n_s, n_a)
        self.frozen = copy.deepcopy(self.online)
        self.frozen.eval()
        self.opt = optim.RMSprop(self.online.parameters(), lr=opts.lr)
        self.n_a, self.gamma = n_a, opts.gamma
        self.memory = deque(maxlen=100_000)

    def choose(self, s, eps):
        if random.random() < eps:
            return random.randrange(self.n_a)
        with torch.no_grad():
            return self.online(torch.from_numpy(s)[None]).argmax(1).item()

    def td_error(self, b):
        q = self.online(b.s).gather(1, b.a[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.online(b.s2).argmax(1, keepdim=True)
            tgt = b.r + self.gamma * (1 - b.d) * self.frozen(b.s2).gather(1, best).squeeze(1)
        return nn.functional.smooth_l1_loss(q, tgt)

    def learn(self, n):
        rows = Tr(*zip(*random.sample(self.memory, n)))
        b = Tr(torch.from_numpy(np.stack(rows.s)), torch.tensor(rows.a), torch.tensor(rows.r, dtype=torch.float32),
               torch.from_numpy(np.stack(rows.s2)), torch.tensor(rows.d, dtype=torch.float32))
        loss = self.td_error(b)
        self.online.zero_grad()
        loss.backward()
        for p in self.online.parameters():
            p.grad.clamp_(-1, 1)
        self.opt.step()
        return loss.item()

    def sync(self):
        self.frozen.load_state_dict(self.online.state_dict())


def greedy_return(agent, env_id, episodes=5):
    env, total = gym.make(env_id), 0.0
    for k in range(episodes):
        s, _ = env.reset(seed=1000 + k)
        over = False
        while not over:
            s, r, term, trunc, _ = env.step(agent.choose(s, 0.0))
            total += r
            over = term or trunc
    return total / episodes


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--env", default="LunarLander-v2")
    p.add_argument("--steps", type=int, default=300_000)
    p.add_argument("--lr", type=float, default=2.5e-4)
    p.add_argument("--gamma", type=float, default=0.99)
    opts = p.parse_args()
    env = gym.make(opts.env)
    ag = Agent(env.observation_space.shape[0], env.action_space.n, opts)
    s, _ = env.reset(seed=0)
    recent = deque(maxlen=1000)
    for t in range(opts.steps):
        eps = max(0.05, 1 - t / 50_000)
        a = ag.choose(s, eps)
        s2, r, term, trunc, _ = env.step(a)
        ag.memory.append(Tr(s, a, r, s2, float(term)))
        s = env.reset()[0] if term or trunc else s2
        if t > 2000 and t % 4 == 0:
            recent.append(ag.learn(128))
        if t % 1000 == 0:
            ag.sync()
        if t % 10_000 == 0 and recent:
            print(f"{t} td {np.mean(recent):.4f} greedy {greedy_return(ag, opts.env):.1f}")


if __name__ == "__main__":
    main()
