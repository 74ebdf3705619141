import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

LOG_MIN, LOG_MAX = -5, 2


def mlp(i, o, h=256):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Actor(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.net = mlp(n_obs, 2 * n_act)

    def forward(self, o):
        mu, ls = self.net(o).chunk(2, -1)
        ls = LOG_MIN + 0.5 * (LOG_MAX - LOG_MIN) * (torch.tanh(ls) + 1)
        dist = torch.distributions.Normal(mu, ls.exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = (dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1)
        return a, logp


class Critic(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.q1, self.q2 = mlp(n_obs + n_act, 1), mlp(n_obs + n_act, 1)

    def forward(self, o, a):
        x = torch.cat([o, a], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Buffer:
    def __init__(self, n, no, na):
        self.o, self.o2 = np.zeros((n, no), np.float32), np.zeros((n, no), np.float32)
        self.a, self.r, self.d = np.zeros((n, na), np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.n, self.i, self.full = n, 0, False

    def add(self, o, a, r, o2, d):
        i = self.i
        self.o[i], self.a[i], self.r[i], self.o2[i], self.d[i] = o, a, r, o2, d
        self.i = (i + 1) % self.n
        self.full |= self.i == 0

    def draw(self, k, dev):
        j = np.random.randint(0, self.n if self.full else self.i, k)
        return [torch.from_numpy(v[j]).to(dev) for v in (self.o, self.a, self.r, self.o2, self.d)]


def main(env_id="Pendulum-v1", steps=50_000, gamma=0.99, tau=0.005):
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = gym.make(env_id)
    no, na = env.observation_space.shape[0], env.action_space.shape[0]
    scale = float(env.action_space.high[0])
    actor, critic, target = Actor(no, na).to(dev), Critic(no, na).to(dev), Critic(no, na).to(dev)
    target.load_state_dict(critic.state_dict())
    log_alpha = torch.zeros(1, device=dev, requires_grad=True)
    opt_pi = torch.optim.Adam(actor.parameters(), lr=3e-4)
    opt_q = torch.optim.Adam(critic.parameters(), lr=1e-3)
    opt_alpha = torch.optim.Adam([log_alpha], lr=3e-4)
    buf = Buffer(steps, no, na)
    o, _ = env.reset(seed=0)
    for step in range(steps):
        if step < 1000:
            a = env.action_space.sample() / scale
        else:
            with torch.no_grad():
                a = actor(torch.as_tensor(o, dtype=torch.float32, device=dev)[None])[0][0].cpu().numpy()
        o2, r, term, trunc, _ = env.step(a * scale)
        buf.add(o, a, r, o2, float(term))
        o = env.reset()[0] if term or trunc else o2
        if step < 1000:
            continue

        bo, ba, br, bo2, bd = buf.draw(256, dev)
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            a2, lp2 = actor(bo2)
            y = br + gamma * (1 - bd) * (torch.min(*target(bo2, a2)) - alpha * lp2)
        q1, q2 = critic(bo, ba)
        loss_q = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        opt_q.zero_grad()
        loss_q.backward()
        opt_q.step()

        pi, lp = actor(bo)
        loss_pi = (alpha * lp - torch.min(*critic(bo, pi))).mean()
        opt_pi.zero_grad()
        loss_pi.backward()
        opt_pi.step()

        loss_alpha = -(log_alpha * (lp.detach() - na)).mean()
        opt_alpha.zero_grad()
        loss_alpha.backward()
        opt_alpha.step()
        with torch.no_grad():
            for t, p in zip(target.parameters(), critic.parameters()):
                t.lerp_(p, tau)
        if step % 1000 == 0:
            print(step, f"q {loss_q.item():.3f} pi {loss_pi.item():.3f} alpha {alpha.item():.3f}")


if __name__ == "__main__":
    main()
