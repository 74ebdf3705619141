import copy
import random
from collections import deque

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Replay:
    def __init__(self, cap):
        self.buf = deque(maxlen=cap)

    def push(self, *transition):
        self.buf.append(transition)

    def sample(self, n):
        cols = zip(*random.sample(self.buf, n))
        return [torch.as_tensor(np.array(c), dtype=torch.float32) for c in cols]


def td_loss(online, target, batch, gamma):
    s, a, r, s2, d = batch
    q = online(s).gather(1, a.long().unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = online(s2).argmax(1, keepdim=True)
        goal = r + gamma * (1 - d) * target(s2).gather(1, best).squeeze(1)
    return F.smooth_l1_loss(q, goal)


def main(steps=100_000, batch=128, gamma=0.99, sync=1000):
    env = gym.make("LunarLander-v2")
    n_obs, n_act = env.observation_space.shape[0], env.action_space.n
    online = nn.Sequential(nn.Linear(n_obs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, n_act))
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-4)
    memory = Replay(50_000)
    obs, _ = env.reset()
    score = 0.0
    for step in range(steps):
        eps = max(0.05, 1 - step / 20_000)
        if random.random() < eps:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = online(torch.as_tensor(obs).float()).argmax().item()
        nxt, reward, term, trunc, _ = env.step(action)
        memory.push(obs, action, reward, nxt, float(term))
        obs = nxt
        score += reward
        if term or trunc:
            print(step, score)
            obs, _ = env.reset()
            score = 0.0
        if len(memory.buf) >= 5000:
            loss = td_loss(online, target, memory.sample(batch), gamma)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(online.parameters(), 100)
            optimizer.step()
        if step % sync == 0:
            target.load_state_dict(online.state_dict())


if __name__ == "__main__":
    main()
