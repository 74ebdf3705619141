import argparse
from itertools import count

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description='Policy gradient with running baseline')
parser.add_argument('--gamma', type=float, default=0.99)
parser.add_argument('--seed', type=int, default=543)
parser.add_argument('--log-interval', type=int, default=10)
args = parser.parse_args()

env = gym.make('CartPole-v1')
env.reset(seed=args.seed)
torch.manual_seed(args.seed)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 128)
        self.drop = nn.Dropout(p=0.6)
        self.fc2 = nn.Linear(128, 2)
        self.log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.fc2(F.relu(self.drop(self.fc1(x)))), dim=-1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
eps = np.finfo(np.float32).eps.item()


def pick(state):
    probs = policy(torch.from_numpy(np.asarray(state, dtype=np.float32)).unsqueeze(0))
    m = Categorical(probs)
    a = m.sample()
    policy.log_probs.append(m.log_prob(a))
    return a.item()


def end_of_episode():
    R, rets, terms = 0.0, [], []
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        rets.append(R)
    rets = torch.tensor(rets[::-1])
    rets = (rets - rets.mean()) / (rets.std() + eps)
    for lp, R in zip(policy.log_probs, rets):
        terms.append(-lp * R)
    optimizer.zero_grad()
    loss = torch.cat(terms).sum()
    loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.log_probs[:]
    return loss.item()


def main():
    running = 10.0
    for ep in count(1):
        state, _ = env.reset()
        total = 0.0
        for _ in range(1, 10000):
            state, reward, term, trunc, _ = env.step(pick(state))
            policy.rewards.append(float(reward))
            total += float(reward)
            if term or trunc:
                break
        running = 0.05 * total + 0.95 * running
        loss = end_of_episode()
        if ep % args.log_interval == 0:
            print(f'Episode {ep}\tlast {total:.1f}\tavg {running:.1f}\tloss {loss:.3f}')
        if running > env.spec.reward_threshold:
            print(f'Solved after {ep} episodes')
            break


if __name__ == '__main__':
    main()
