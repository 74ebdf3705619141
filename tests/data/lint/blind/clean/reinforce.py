import gymnasium as gym
import torch
import torch.nn as nn
from torch.distributions import Categorical

GAMMA = 0.99


class Policy(nn.Module):
    def __init__(self, obs_dim, n_actions):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, 128), nn.Tanh(), nn.Linear(128, n_actions))

    def forward(self, obs):
        return Categorical(logits=self.body(obs))


def play(env, policy):
    obs, _ = env.reset()
    log_probs, rewards, done = [], [], False
    while not done:
        dist = policy(torch.as_tensor(obs, dtype=torch.float32))
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        obs, reward, terminated, truncated, _ = env.step(action.item())
        rewards.append(reward)
        done = terminated or truncated
    return torch.stack(log_probs), rewards


def discounted(rewards):
    out, g = [], 0.0
    for r in reversed(rewards):
        g = r + GAMMA * g
        out.append(g)
    ret = torch.tensor(out[::-1])
    return (ret - ret.mean()) / (ret.std() + 1e-8)


def main():
    env = gym.make("CartPole-v1")
    policy = Policy(env.observation_space.shape[0], env.action_space.n)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    smoothed = 10.0
    for episode in range(1500):
        log_probs, rewards = play(env, policy)
        loss = -(log_probs * discounted(rewards)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        smoothed = 0.95 * smoothed + 0.05 * sum(rewards)
        if episode % 20 == 0:
            print(f"episode {episode} return {smoothed:.1f}")
        if smoothed > env.spec.reward_threshold:
            break


if __name__ == "__main__":
    main()
