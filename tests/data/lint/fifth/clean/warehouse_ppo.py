import argparse

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical


def ortho(layer, gain):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Brain(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.trunk = nn.Sequential(ortho(nn.Linear(n_obs, 128), 1.4), nn.Tanh(), ortho(nn.Linear(128, 128), 1.4), nn.Tanh())
        self.actor = ortho(nn.Linear(128, n_act), 0.01)
        self.critic = ortho(nn.Linear(128, 1), 1.0)

    def forward(self, o):
        h = self.trunk(o)
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


@torch.no_grad()
def collect(envs, net, obs, horizon, dev):
    keep = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
    for _ in range(horizon):
        pi, v = net(obs)
        a = pi.sample()
        nxt, r, term, trunc, _ = envs.step(a.cpu().numpy())
        vals = (obs, a, pi.log_prob(a), v, torch.as_tensor(r, dtype=torch.float32, device=dev),
                torch.as_tensor(term | trunc, dtype=torch.float32, device=dev))
        for k, x in zip(keep, vals):
            keep[k].append(x)
        obs = torch.as_tensor(nxt, dtype=torch.float32, device=dev)
    roll = {k: torch.stack(v) for k, v in keep.items()}
    roll["last"] = net(obs)[1]
    return roll, obs


def gae(roll, gamma, lam):
    adv = torch.zeros_like(roll["rew"])
    run, nxt = torch.zeros_like(roll["last"]), roll["last"]
    for t in reversed(range(adv.size(0))):
        live = 1 - roll["done"][t]
        delta = roll["rew"][t] + gamma * nxt * live - roll["val"][t]
        run = delta + gamma * lam * live * run
        adv[t], nxt = run, roll["val"][t]
    return adv, adv + roll["val"]


def improve(net, opt, flat, args):
    n = flat["act"].size(0)
    kl = 0.0
    for _ in range(args.passes):
        for idx in torch.randperm(n, device=flat["act"].device).split(args.minibatch):
            b = {k: v[idx] for k, v in flat.items()}
            pi, v = net(b["obs"])
            logratio = pi.log_prob(b["act"]) - b["logp"]
            ratio = logratio.exp()
            adv = (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8)
            gain = torch.min(ratio * adv, ratio.clamp(1 - args.eps, 1 + args.eps) * adv).mean()
            loss = -gain + 0.5 * (v - b["ret"]).pow(2).mean() - args.ent * pi.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            kl = (ratio - 1 - logratio).mean().item()
        if kl > 0.03:
            break
    return kl


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--env", default="CartPole-v1")
    p.add_argument("--n-envs", type=int, default=8)
    p.add_argument("--horizon", type=int, default=128)
    p.add_argument("--updates", type=int, default=600)
    p.add_argument("--minibatch", type=int, default=256)
    p.add_argument("--passes", type=int, default=4)
    p.add_argument("--eps", type=float, default=0.2)
    p.add_argument("--ent", type=float, default=0.01)
    p.add_argument("--lr", type=float, default=2.5e-4)
    args = p.parse_args()
    dev = torch.device("cpu")
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(args.env) for _ in range(args.n_envs)])
    net = Brain(envs.single_observation_space.shape[0], envs.single_action_space.n).to(dev)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr, eps=1e-5)
    anneal = torch.optim.lr_scheduler.LambdaLR(opt, lambda u: 1.0 - u / args.updates)
    obs = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32, device=dev)
    for u in range(args.updates):
        roll, obs = collect(envs, net, obs, args.horizon, dev)
        adv, ret = gae(roll, 0.99, 0.95)
        flat = {k: roll[k].flatten(0, 1) for k in ("obs", "act", "logp")}
        flat.update(adv=adv.flatten(), ret=ret.flatten())
        kl = improve(net, opt, flat, args)
        anneal.step()
        if u % 10 == 0:
            print(f"{u} reward/step {roll['rew'].mean():.3f} kl {kl:.4f}")


if __name__ == "__main__":
    main()
