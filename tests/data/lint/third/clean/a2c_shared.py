"""Advantage actor-critic; shared trunk, and the two heads' gradients are measured apart."""
import gymnasium as gym
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self, obs, act, h=128):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh())
        self.pi, self.v = nn.Linear(h, act), nn.Linear(h, 1)

    def forward(self, x):
        h = self.trunk(x)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def grad_norm(module):
    g = [p.grad.detach().norm() for p in module.parameters() if p.grad is not None]
    return torch.stack(g).norm().item() if g else 0.0


def rollout(env, net, obs, n, device):
    logps, values, rewards, masks, ents = [], [], [], [], []
    finished = []
    for _ in range(n):
        dist, v = net(torch.as_tensor(obs, dtype=torch.float32, device=device))
        a = dist.sample()
        obs, r, term, trunc, info = env.step(a.item())
        logps.append(dist.log_prob(a))
        ents.append(dist.entropy())
        values.append(v)
        rewards.append(float(r))
        masks.append(0.0 if term or trunc else 1.0)
        if term or trunc:
            finished.append(info.get("episode", {}).get("r", 0.0))
            obs, _ = env.reset()
    with torch.no_grad():
        _, boot = net(torch.as_tensor(obs, dtype=torch.float32, device=device))
    return obs, torch.stack(logps), torch.stack(values), rewards, masks, torch.stack(ents), boot, finished


def returns(rewards, masks, boot, gamma):
    out, R = [], boot
    for r, m in zip(reversed(rewards), reversed(masks)):
        R = r + gamma * m * R
        out.insert(0, R)
    return torch.stack(out)


def main(updates=20_000, n=32, gamma=0.99, ent_w=0.01, v_w=0.5):
    device = torch.device("cpu")
    torch.manual_seed(3)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    net = ActorCritic(env.observation_space.shape[0], env.action_space.n).to(device)
    opt = torch.optim.RMSprop(net.parameters(), lr=7e-4, eps=1e-5, alpha=0.99)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, total_iters=updates)
    obs, _ = env.reset(seed=3)
    recent = []
    for u in range(updates):
        obs, logp, val, rew, mask, ent, boot, fin = rollout(env, net, obs, n, device)
        ret = returns(rew, mask, boot, gamma)
        adv = (ret - val).detach()
        pi_loss = -(logp * adv).mean() - ent_w * ent.mean()
        v_loss = v_w * F.mse_loss(val, ret)

        opt.zero_grad()
        pi_loss.backward(retain_graph=True)
        g_pi = grad_norm(net.trunk)
        v_loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        sched.step()

        recent = (recent + [float(f) for f in fin])[-50:]
        if u % 500 == 0 and recent:
            print(f"{u} return {sum(recent) / len(recent):.1f} pi {pi_loss.item():.3f} v {v_loss.item():.3f} |g_pi| {g_pi:.3f}")


if __name__ == "__main__":
    main()
