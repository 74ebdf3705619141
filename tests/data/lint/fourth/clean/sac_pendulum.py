import copy

import gymnasium as gym
import torch
import torch.nn as nn
import torch.nn.functional as F

from replay import ReplayBuffer

LOG_STD = (-5, 2)


def mlp(i, o, h=256):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Actor(nn.Module):
    def __init__(self, obs, act, scale):
        super().__init__()
        self.net, self.scale = mlp(obs, 2 * act), scale

    def forward(self, s, deterministic=False):
        mu, log_std = self.net(s).chunk(2, -1)
        d = torch.distributions.Normal(mu, log_std.clamp(*LOG_STD).exp())
        u = mu if deterministic else d.rsample()
        a = torch.tanh(u)
        logp = (d.log_prob(u) - torch.log(self.scale * (1 - a.pow(2)) + 1e-6)).sum(-1)
        return a * self.scale, logp


class SAC:
    def __init__(self, obs, act, scale, device, gamma=0.99, tau=0.005):
        self.gamma, self.tau = gamma, tau
        self.actor = Actor(obs, act, scale).to(device)
        self.q = nn.ModuleList([mlp(obs + act, 1), mlp(obs + act, 1)]).to(device)
        self.q_targ = copy.deepcopy(self.q).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True, device=device)
        self.target_entropy = -float(act)
        self.opt = {
            "q": torch.optim.Adam(self.q.parameters(), lr=1e-3),
            "pi": torch.optim.Adam(self.actor.parameters(), lr=3e-4),
            "alpha": torch.optim.Adam([self.log_alpha], lr=1e-3),
        }

    def _apply(self, name, loss):
        self.opt[name].zero_grad()
        loss.backward()
        self.opt[name].step()

    @staticmethod
    def _min_q(qs, s, a):
        x = torch.cat([s, a], -1)
        return torch.min(qs[0](x), qs[1](x)).squeeze(-1)

    def update(self, s, a, r, s2, d):
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            a2, lp2 = self.actor(s2)
            y = r + self.gamma * (1 - d) * (self._min_q(self.q_targ, s2, a2) - alpha * lp2)
        x = torch.cat([s, a], -1)
        q_loss = sum(F.mse_loss(q(x).squeeze(-1), y) for q in self.q)
        self._apply("q", q_loss)

        self.q.requires_grad_(False)
        pi, lp = self.actor(s)
        pi_loss = (alpha * lp - self._min_q(self.q, s, pi)).mean()
        self._apply("pi", pi_loss)
        self.q.requires_grad_(True)

        alpha_loss = -(self.log_alpha * (lp.detach() + self.target_entropy)).mean()
        self._apply("alpha", alpha_loss)
        with torch.no_grad():
            for t, p in zip(self.q_targ.parameters(), self.q.parameters()):
                t.mul_(1 - self.tau).add_(p, alpha=self.tau)
        return q_loss.item(), pi_loss.item(), alpha.item()

    @torch.no_grad()
    def act(self, obs, device, deterministic=False):
        s = torch.as_tensor(obs, dtype=torch.float32, device=device).unsqueeze(0)
        return self.actor(s, deterministic)[0].squeeze(0).cpu().numpy()


def main(steps=30000, start=1000, batch=256, device="cpu"):
    env = gym.make("Pendulum-v1")
    torch.manual_seed(0)
    buf = ReplayBuffer(100000, device)
    agent = SAC(3, 1, float(env.action_space.high[0]), device)
    obs, _ = env.reset(seed=0)
    ret = 0.0
    for t in range(steps):
        a = env.action_space.sample() if t < start else agent.act(obs, device)
        nxt, r, term, trunc, _ = env.step(a)
        buf.add(obs, a, r, nxt, float(term))
        obs, ret = nxt, ret + r
        if term or trunc:
            print(t, f"return {ret:.1f}")
            obs, _ = env.reset()
            ret = 0.0
        if t >= start:
            info = agent.update(*buf.sample(batch))
            if t % 2000 == 0:
                print("q %.3f pi %.3f alpha %.3f" % info)


if __name__ == "__main__":
    main()
