import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical


def layer_init(layer, std=np.sqrt(2), bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        size = int(np.prod(envs.single_observation_space.shape))
        self.critic = nn.Sequential(layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 1), std=1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 2), std=0.01))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def train(envs, num_updates=500, num_steps=128, epochs=4, minibatch=256, gamma=0.99, lam=0.95, clip=0.2):
    torch.manual_seed(1)
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    next_obs = torch.tensor(envs.reset()[0])
    for update in range(1, num_updates + 1):
        frac = 1.0 - (update - 1.0) / num_updates
        optimizer.param_groups[0]["lr"] = frac * 2.5e-4
        obs, actions, logprobs, rewards, dones, values = [], [], [], [], [], []
        for step in range(num_steps):
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
            obs.append(next_obs)
            values.append(value.flatten())
            next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
            next_obs = torch.tensor(next_obs)
            actions.append(action), logprobs.append(logprob)
            rewards.append(torch.tensor(reward)), dones.append(torch.tensor(terminated | truncated).float())
        with torch.no_grad():
            next_value = agent.get_value(next_obs).flatten()
            advantages, last = [], 0
            for t in reversed(range(num_steps)):
                after = next_value if t == num_steps - 1 else values[t + 1]
                delta = rewards[t] + gamma * after * (1 - dones[t]) - values[t]
                last = delta + gamma * lam * (1 - dones[t]) * last
                advantages.insert(0, last)
        b_obs, b_act, b_logp = torch.cat(obs), torch.cat(actions), torch.cat(logprobs)
        b_adv = torch.cat(advantages)
        b_ret = b_adv + torch.cat(values)
        for epoch in range(epochs):
            perm = torch.randperm(len(b_obs))
            for start in range(0, len(b_obs), minibatch):
                mb = perm[start : start + minibatch]
                _, newlogp, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_act[mb])
                ratio = (newlogp - b_logp[mb]).exp()
                adv = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()
                v_loss = 0.5 * (newvalue.view(-1) - b_ret[mb]).pow(2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
