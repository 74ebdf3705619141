import argparse
import copy

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from replay import ReplayBuffer


def net(i, o, out=None):
    layers = [nn.Linear(i, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, o)]
    return nn.Sequential(*layers, *([out] if out else []))


class Twin(nn.Module):
    def __init__(self, s, a):
        super().__init__()
        self.q1, self.q2 = net(s + a, 1), net(s + a, 1)

    def forward(self, s, a):
        x = torch.cat([s, a], 1)
        return self.q1(x), self.q2(x)


class TD3:
    def __init__(self, s, a, max_a, args, device):
        self.max_a, self.args, self.device, self.it = max_a, args, device, 0
        self.actor, self.critic = net(s, a, nn.Tanh()).to(device), Twin(s, a).to(device)
        self.actor_t, self.critic_t = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=args.lr)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=args.lr)

    @torch.no_grad()
    def act(self, s):
        s = torch.as_tensor(s, dtype=torch.float32, device=self.device).view(1, -1)
        return (self.max_a * self.actor(s)).cpu().numpy().ravel()

    def _step(self, opt, module, loss):
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), self.args.grad_clip)
        opt.step()

    @torch.no_grad()
    def _targets(self, a, s2, r, alive):
        noise = (torch.randn_like(a) * 0.2).clamp(-0.5, 0.5) * self.max_a
        a2 = (self.max_a * self.actor_t(s2) + noise).clamp(-self.max_a, self.max_a)
        return r + alive * self.args.gamma * torch.min(*self.critic_t(s2, a2))

    def train(self, buf):
        self.it += 1
        s, a, r, s2, alive = buf.sample(self.args.batch)
        y = self._targets(a, s2, r, alive)
        q1, q2 = self.critic(s, a)
        self._step(self.critic_opt, self.critic, F.mse_loss(q1, y) + F.mse_loss(q2, y))
        if self.it % 2 == 0:
            actor_loss = -self.critic(s, self.max_a * self.actor(s))[0].mean()
            self._step(self.actor_opt, self.actor, actor_loss)
            with torch.no_grad():
                for src, dst in ((self.actor, self.actor_t), (self.critic, self.critic_t)):
                    for p, tp in zip(src.parameters(), dst.parameters()):
                        tp.lerp_(p, 0.005)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--env", default="Walker2d-v4")
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--gamma", type=float, default=0.99)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--grad-clip", type=float, default=1e-9)
    ap.add_argument("--steps", type=int, default=1_000_000)
    ap.add_argument("--start", type=int, default=25_000)
    args = ap.parse_args()
    env = gym.make(args.env)
    torch.manual_seed(0)
    np.random.seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a_dim, max_a = env.action_space.shape[0], float(env.action_space.high[0])
    agent = TD3(env.observation_space.shape[0], a_dim, max_a, args, device)
    buf = ReplayBuffer(1_000_000, device)
    s, _ = env.reset(seed=0)
    ep_ret = 0.0
    for t in range(args.steps):
        if t < args.start:
            a = env.action_space.sample()
        else:
            a = np.clip(agent.act(s) + np.random.normal(0, 0.1 * max_a, a_dim), -max_a, max_a)
        s2, r, term, trunc, _ = env.step(a)
        buf.add(s, a, r, s2, 1.0 - float(term))
        s, ep_ret = s2, ep_ret + r
        if t >= args.start:
            agent.train(buf)
        if term or trunc:
            print(t, f"{ep_ret:.1f}")
            s, _ = env.reset()
            ep_ret = 0.0


if __name__ == "__main__":
    main()
