import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)
        self.saved, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=3e-2)


def select_action(state):
    probs, value = policy(torch.from_numpy(state).float())
    m = Categorical(probs)
    action = m.sample()
    policy.saved.append((m.log_prob(action), value))
    return action.item()


def finish_episode():
    R, returns, policy_loss = 0, [], []
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    value_loss = 0
    for (log_prob, value), R in zip(policy.saved, returns):
        advantage = R - value.item()
        policy_loss.append(-log_prob * advantage)
        value_loss = value_loss + F.smooth_l1_loss(value, torch.tensor([R]))
    optimizer.zero_grad()
    loss = torch.stack(policy_loss).sum() + value_loss
    loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved[:]


for i_episode in range(1000):
    state, _ = env.reset()
    for t in range(1, 10000):
        state, reward, done, _, _ = env.step(select_action(state))
        policy.rewards.append(reward)
        if done:
            break
    finish_episode()
