import argparse

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

from atari import make_vec_env


class ActorCritic(nn.Module):
    def __init__(self, n_act):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                                  nn.Conv2d(64, 32, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 512), nn.ReLU())
        self.pi, self.v = nn.Linear(512, n_act), nn.Linear(512, 1)

    def forward(self, x):
        h = self.body(x.float() / 255.0)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


class Rollout:
    def __init__(self):
        self.obs, self.act, self.rew, self.mask = [], [], [], []

    def returns(self, last, gamma):
        out, R = [], last
        for r, m in zip(reversed(self.rew), reversed(self.mask)):
            R = r + gamma * R * m
            out.insert(0, R)
        return torch.stack(out)


class A2C:
    def __init__(self, env, args, device):
        self.env, self.args, self.device = env, args, device
        self.net = ActorCritic(env.action_space.n).to(device)
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=args.lr, eps=1e-5, alpha=0.99)
        self.obs = torch.as_tensor(env.reset(), device=device)

    @torch.no_grad()
    def collect(self):
        ro = Rollout()
        for _ in range(self.args.n_steps):
            dist, _ = self.net(self.obs)
            a = dist.sample()
            nxt, r, done, _ = self.env.step(a.cpu().numpy())
            ro.obs.append(self.obs); ro.act.append(a)
            ro.rew.append(torch.as_tensor(r, dtype=torch.float32, device=self.device))
            ro.mask.append(torch.as_tensor(1.0 - done, dtype=torch.float32, device=self.device))
            self.obs = torch.as_tensor(nxt, device=self.device)
        _, last = self.net(self.obs)
        return ro, ro.returns(last, self.args.gamma)

    def update(self, ro, ret):
        dist, v = self.net(torch.cat(ro.obs))
        adv = ret.flatten() - v
        pi_loss = -(dist.log_prob(torch.cat(ro.act)) * adv.detach()).mean()
        loss = pi_loss + 0.5 * adv.pow(2).mean() - self.args.ent * dist.entropy().mean()
        self.opt.zero_grad()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.args.max_grad_norm)
        loss.backward()
        self.opt.step()
        return loss.item(), pi_loss.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--env", default="BreakoutNoFrameskip-v4")
    p.add_argument("--n-envs", type=int, default=16)
    p.add_argument("--n-steps", type=int, default=5)
    p.add_argument("--lr", type=float, default=7e-4)
    p.add_argument("--gamma", type=float, default=0.99)
    p.add_argument("--ent", type=float, default=0.01)
    p.add_argument("--max-grad-norm", type=float, default=0.5)
    p.add_argument("--updates", type=int, default=100000)
    args = p.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    agent = A2C(make_vec_env(args.env, args.n_envs), args, "cuda" if torch.cuda.is_available() else "cpu")
    for u in range(args.updates):
        loss, pg = agent.update(*agent.collect())
        if u % 500 == 0:
            print(f"update {u} loss {loss:.4f} pg {pg:.4f}")
            torch.save(agent.net.state_dict(), "a2c.pt")


if __name__ == "__main__":
    main()
