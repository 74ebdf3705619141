import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal

GAMMA, LAM, N_ENV, T = 0.95, 0.9, 16, 64


class GaussPolicy(nn.Module):
    def __init__(self, o, a):
        super().__init__()
        self.mu = nn.Sequential(nn.Linear(o, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, a))
        self.v = nn.Sequential(nn.Linear(o, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.zeros(a))

    def dist(self, o):
        return Normal(self.mu(o), self.log_std.exp())

    def value(self, o):
        return self.v(o).squeeze(-1)


class Runner:
    def __init__(self, policy):
        self.envs = gym.vector.SyncVectorEnv([lambda: gym.make("Pendulum-v1")] * N_ENV)
        self.policy = policy
        self.obs = torch.tensor(self.envs.reset(seed=7)[0], dtype=torch.float32)

    @torch.no_grad()
    def gather(self):
        O, A, R, D, V = [], [], [], [], []
        for _ in range(T):
            a = self.policy.dist(self.obs).sample()
            nxt, r, te, tr, _ = self.envs.step(a.clamp(-2, 2).numpy())
            O.append(self.obs)
            A.append(a)
            R.append(torch.tensor(r / 8, dtype=torch.float32))
            D.append(torch.tensor(te | tr, dtype=torch.float32))
            V.append(self.policy.value(self.obs))
            self.obs = torch.tensor(nxt, dtype=torch.float32)
        V.append(self.policy.value(self.obs))
        adv, run = [None] * T, torch.zeros(N_ENV)
        for t in reversed(range(T)):
            delta = R[t] + GAMMA * V[t + 1] * (1 - D[t]) - V[t]
            run = delta + GAMMA * LAM * (1 - D[t]) * run
            adv[t] = run
        adv, V = torch.stack(adv), torch.stack(V[:-1])
        flat = lambda z: z.reshape(T * N_ENV, *z.shape[2:])
        return flat(torch.stack(O)), flat(torch.stack(A)), flat(adv), flat(adv + V), torch.stack(R).mean().item()


def a2c_loss(policy, o, a, adv, ret):
    d = policy.dist(o)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    pg = -(d.log_prob(a).sum(-1) * adv).mean()
    vf = (policy.value(o) - ret).pow(2).mean()
    return pg + 0.5 * vf - 1e-3 * d.entropy().sum(-1).mean()


def update(policy, opt, batch):
    loss = a2c_loss(policy, *batch)
    opt.zero_grad()
    loss.backward()
    opt.step()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    return loss.item(), norm.item()


def main(updates=3000):
    torch.manual_seed(7)
    policy = GaussPolicy(3, 1)
    opt = torch.optim.RMSprop(policy.parameters(), lr=7e-4, eps=1e-5)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, total_iters=updates)
    runner = Runner(policy)
    rewards = []
    for u in range(updates):
        *batch, mean_r = runner.gather()
        loss, norm = update(policy, opt, batch)
        sched.step()
        rewards.append(mean_r)
        if u % 50 == 0:
            print(f"{u:5d} r {np.mean(rewards[-50:]):.3f} loss {loss:.3f} |g| {norm:.2f}")
    torch.save(policy.state_dict(), "pendulum.pt")


if __name__ == "__main__":
    main()
