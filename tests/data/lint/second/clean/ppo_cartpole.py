import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

ENV, SEED, STEPS, UPDATES = "CartPole-v1", 1, 1024, 300
GAMMA, LAM, CLIP, ENT, VF = 0.99, 0.95, 0.2, 0.01, 0.5
MINIBATCH, EPOCHS, LR, MAX_NORM = 64, 4, 2.5e-4, 0.5


def layer_init(layer, std=np.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.body = nn.Sequential(layer_init(nn.Linear(obs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh())
        self.pi = layer_init(nn.Linear(64, act), 0.01)
        self.v = layer_init(nn.Linear(64, 1), 1.0)

    def forward(self, x, action=None):
        h = self.body(x)
        dist = Categorical(logits=self.pi(h))
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.v(h).squeeze(-1)


def gae(rew, val, done, last):
    adv = torch.zeros_like(rew)
    run = 0.0
    for t in reversed(range(len(rew))):
        nxt = last if t == len(rew) - 1 else val[t + 1]
        delta = rew[t] + GAMMA * nxt * (1 - done[t]) - val[t]
        run = delta + GAMMA * LAM * (1 - done[t]) * run
        adv[t] = run
    return adv


torch.manual_seed(SEED)
np.random.seed(SEED)
env = gym.make(ENV)
agent = Agent(env.observation_space.shape[0], env.action_space.n)
optimizer = torch.optim.Adam(agent.parameters(), lr=LR, eps=1e-5)
obs, _ = env.reset(seed=SEED)
returns, ep_ret = [], 0.0

for update in range(1, UPDATES + 1):
    optimizer.param_groups[0]["lr"] = LR * (1.0 - (update - 1.0) / UPDATES)
    O, A, LP, R, D, V = [], [], [], [], [], []
    for _ in range(STEPS):
        o = torch.as_tensor(obs, dtype=torch.float32)
        with torch.no_grad():
            a, lp, _, v = agent(o.unsqueeze(0))
        obs, r, term, trunc, _ = env.step(a.item())
        ep_ret += r
        O.append(o); A.append(a[0]); LP.append(lp[0]); V.append(v[0])
        R.append(r); D.append(float(term or trunc))
        if term or trunc:
            returns.append(ep_ret)
            ep_ret = 0.0
            obs, _ = env.reset()
    with torch.no_grad():
        last = agent(torch.as_tensor(obs, dtype=torch.float32).unsqueeze(0))[3][0]
    O, A, LP, V = torch.stack(O), torch.stack(A), torch.stack(LP), torch.stack(V)
    adv = gae(torch.tensor(R), V, torch.tensor(D), last)
    ret = adv + V

    kls = []
    for _ in range(EPOCHS):
        for idx in torch.randperm(STEPS).split(MINIBATCH):
            _, lp, ent, v = agent(O[idx], A[idx])
            logratio = lp - LP[idx]
            ratio = logratio.exp()
            with torch.no_grad():
                kls.append(((ratio - 1) - logratio).mean().item())
            mb = adv[idx]
            mb = (mb - mb.mean()) / (mb.std() + 1e-8)
            pg = torch.max(-mb * ratio, -mb * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            vloss = 0.5 * (v - ret[idx]).pow(2).mean()
            loss = pg - ENT * ent.mean() + VF * vloss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
            optimizer.step()
    print(f"update {update} return {np.mean(returns[-20:]):.1f} kl {np.mean(kls):.4f}")
