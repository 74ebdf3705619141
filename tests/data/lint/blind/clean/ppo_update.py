import torch
import torch.nn as nn
from torch.distributions import Normal

from rollouts import VecCollector


class ActorCritic(nn.Module):
    def __init__(self, obs, act, hidden=64):
        super().__init__()
        self.mu = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, act))
        self.v = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.zeros(act))

    def dist(self, obs):
        return Normal(self.mu(obs), self.log_std.exp())


class PPO:
    def __init__(self, agent, lr=3e-4, clip=0.2, epochs=10, minibatch=64, vf=0.5, ent=0.01):
        self.agent, self.clip, self.epochs, self.mb = agent, clip, epochs, minibatch
        self.vf, self.ent = vf, ent
        self.opt = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)

    def loss(self, b):
        dist = self.agent.dist(b["obs"])
        logp = dist.log_prob(b["act"]).sum(-1)
        ratio = (logp - b["logp"]).exp()
        adv = (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8)
        pg = -torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv).mean()
        value = (self.agent.v(b["obs"]).squeeze(-1) - b["ret"]).pow(2).mean()
        return pg + self.vf * value - self.ent * dist.entropy().sum(-1).mean()

    def update(self, rollout):
        n = rollout["obs"].size(0)
        for _ in range(self.epochs):
            for idx in torch.randperm(n).split(self.mb):
                loss = self.loss({k: v[idx] for k, v in rollout.items()})
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.opt.step()


def main(iterations=500):
    collector = VecCollector("HalfCheetah-v4", n_envs=8)
    agent = ActorCritic(collector.obs_dim, collector.act_dim)
    algo = PPO(agent)
    for it in range(iterations):
        with torch.no_grad():
            rollout = collector.collect(agent, steps=256)
        algo.update(rollout)
        print(it, collector.mean_return())


if __name__ == "__main__":
    main()
