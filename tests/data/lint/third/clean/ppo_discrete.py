import random
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    seed: int = 1
    total: int = 500_000
    lr: float = 2.5e-4
    num_envs: int = 4
    num_steps: int = 128
    gamma: float = 0.99
    lam: float = 0.95
    epochs: int = 4
    minibatches: int = 4
    clip: float = 0.2
    ent: float = 0.01
    vf: float = 0.5
    max_grad_norm: float = 0.5


def layer(i, o, std=2 ** 0.5):
    m = nn.Linear(i, o)
    nn.init.orthogonal_(m.weight, std)
    nn.init.zeros_(m.bias)
    return m


class Agent(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.critic = nn.Sequential(layer(obs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.actor = nn.Sequential(layer(obs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, act, 0.01))

    def value(self, x):
        return self.critic(x).squeeze(-1)

    def act(self, x, a=None):
        d = Categorical(logits=self.actor(x))
        a = d.sample() if a is None else a
        return a, d.log_prob(a), d.entropy(), self.value(x)


if __name__ == "__main__":
    args = Args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(args.env_id) for _ in range(args.num_envs)])
    obs_dim, n_act = envs.single_observation_space.shape[0], envs.single_action_space.n
    agent = Agent(obs_dim, n_act).to(dev)
    opt = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    T, N = args.num_steps, args.num_envs
    obs = torch.zeros(T, N, obs_dim, device=dev)
    acts, logps, rews, dones, vals = (torch.zeros(T, N, device=dev) for _ in range(5))
    o = torch.tensor(envs.reset(seed=args.seed)[0], dtype=torch.float32, device=dev)
    d = torch.zeros(N, device=dev)
    updates = args.total // (T * N)
    start = time.time()
    for update in range(1, updates + 1):
        opt.param_groups[0]["lr"] = (1.0 - (update - 1.0) / updates) * args.lr
        for t in range(T):
            obs[t], dones[t] = o, d
            with torch.no_grad():
                a, lp, _, v = agent.act(o)
            acts[t], logps[t], vals[t] = a, lp, v
            nxt, r, term, trunc, _ = envs.step(a.cpu().numpy())
            rews[t] = torch.as_tensor(r, dtype=torch.float32, device=dev)
            o = torch.tensor(nxt, dtype=torch.float32, device=dev)
            d = torch.tensor(np.logical_or(term, trunc), dtype=torch.float32, device=dev)
        with torch.no_grad():
            adv = torch.zeros_like(rews)
            last, nv, nd = 0, agent.value(o), d
            for t in reversed(range(T)):
                delta = rews[t] + args.gamma * nv * (1 - nd) - vals[t]
                adv[t] = last = delta + args.gamma * args.lam * (1 - nd) * last
                nv, nd = vals[t], dones[t]
            ret = adv + vals
        B = T * N
        b_obs, b_act, b_lp = obs.view(B, -1), acts.view(B), logps.view(B)
        b_adv, b_ret = adv.view(B), ret.view(B)
        for _ in range(args.epochs):
            for idx in torch.randperm(B, device=dev).chunk(args.minibatches):
                _, lp, ent, v = agent.act(b_obs[idx], b_act[idx])
                ratio = (lp - b_lp[idx]).exp()
                A = b_adv[idx]
                A = (A - A.mean()) / (A.std() + 1e-8)
                pg = torch.max(-A * ratio, -A * ratio.clamp(1 - args.clip, 1 + args.clip)).mean()
                loss = pg + args.vf * 0.5 * (v - b_ret[idx]).pow(2).mean() - args.ent * ent.mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                opt.step()
        if update % 10 == 0:
            print(update, f"pg {pg.item():.4f} sps {int(update * B / (time.time() - start))}")
    envs.close()
