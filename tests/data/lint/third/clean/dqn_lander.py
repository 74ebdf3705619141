import random
from collections import deque

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Replay:
    def __init__(self, cap):
        self.buf = deque(maxlen=cap)

    def push(self, *tr):
        self.buf.append(tr)

    def sample(self, n, device):
        s, a, r, s2, d = zip(*random.sample(self.buf, n))
        f = lambda v: torch.as_tensor(np.array(v), dtype=torch.float32, device=device)
        return f(s), torch.as_tensor(a, device=device), f(r), f(s2), f(d)

    def __len__(self):
        return len(self.buf)


class DuelingQ(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_obs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.v, self.a = nn.Linear(128, 1), nn.Linear(128, n_act)

    def forward(self, x):
        h = self.trunk(x)
        adv = self.a(h)
        return self.v(h) + adv - adv.mean(-1, keepdim=True)


class DQNAgent:
    def __init__(self, n_obs, n_act, device, gamma=0.99, tau=0.005):
        self.q = DuelingQ(n_obs, n_act).to(device)
        self.target = DuelingQ(n_obs, n_act).to(device)
        self.target.load_state_dict(self.q.state_dict())
        self.opt = torch.optim.AdamW(self.q.parameters(), lr=1e-4, amsgrad=True)
        self.n_act, self.device, self.gamma, self.tau = n_act, device, gamma, tau

    @torch.no_grad()
    def act(self, obs, eps):
        if random.random() < eps:
            return random.randrange(self.n_act)
        x = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
        return self.q(x[None]).argmax(1).item()

    def learn(self, batch):
        s, a, r, s2, d = batch
        q = self.q(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.q(s2).argmax(1, keepdim=True)
            tgt = r + self.gamma * (1 - d) * self.target(s2).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q, tgt)
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(self.q.parameters(), 100)
        self.opt.step()
        self.soft_update()
        return loss.item()

    @torch.no_grad()
    def soft_update(self):
        for t, p in zip(self.target.parameters(), self.q.parameters()):
            t.mul_(1 - self.tau).add_(p, alpha=self.tau)


def run(episodes=600):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = gym.make("LunarLander-v2")
    agent = DQNAgent(env.observation_space.shape[0], env.action_space.n, device)
    mem = Replay(100_000)
    eps, returns = 1.0, []
    for ep in range(episodes):
        obs, _ = env.reset()
        done, ret, losses = False, 0.0, []
        while not done:
            a = agent.act(obs, eps)
            nxt, r, term, trunc, _ = env.step(a)
            mem.push(obs, a, r, nxt, float(term))
            obs, done, ret = nxt, term or trunc, ret + r
            if len(mem) > 2000:
                losses.append(agent.learn(mem.sample(128, device)))
        eps = max(0.05, eps * 0.99)
        returns.append(ret)
        if ep % 20 == 0:
            print(ep, f"return {np.mean(returns[-20:]):.1f} loss {np.mean(losses) if losses else 0:.4f}")


if __name__ == "__main__":
    run()
