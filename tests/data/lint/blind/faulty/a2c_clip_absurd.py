import gymnasium as gym
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(obs, 128), nn.Tanh())
        self.pi, self.v = nn.Linear(128, act), nn.Linear(128, 1)

    def forward(self, obs):
        h = self.base(obs)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def rollout(env, agent, obs, n=32):
    logps, values, rewards, masks, ents = [], [], [], [], []
    for _ in range(n):
        dist, value = agent(torch.as_tensor(obs).float())
        action = dist.sample()
        obs, reward, term, trunc, _ = env.step(action.item())
        logps.append(dist.log_prob(action))
        values.append(value)
        ents.append(dist.entropy())
        rewards.append(float(reward))
        masks.append(0.0 if term or trunc else 1.0)
        if term or trunc:
            obs, _ = env.reset()
    return obs, torch.stack(logps), torch.stack(values), rewards, masks, torch.stack(ents)


def main(updates=5000, gamma=0.99):
    env = gym.make("Acrobot-v1")
    agent = Agent(env.observation_space.shape[0], env.action_space.n)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    obs, _ = env.reset()
    for update in range(updates):
        obs, logps, values, rewards, masks, ents = rollout(env, agent, obs)
        with torch.no_grad():
            ret = agent(torch.as_tensor(obs).float())[1]
        returns = []
        for r, m in zip(reversed(rewards), reversed(masks)):
            ret = r + gamma * m * ret
            returns.insert(0, ret)
        adv = torch.stack(returns) - values
        loss = -(logps * adv.detach()).mean() + 0.5 * adv.pow(2).mean() - 0.01 * ents.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), max_norm=1e-8)
        optimizer.step()
        if update % 100 == 0:
            print(update, sum(rewards))


if __name__ == "__main__":
    main()
