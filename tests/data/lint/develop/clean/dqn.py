import random
from collections import deque

import torch
import torch.nn as nn
import torch.optim as optim

GAMMA, TAU, LR, BATCH = 0.99, 0.005, 3e-4, 128
policy_net, target_net = QNet(), QNet()
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
memory = deque(maxlen=10_000)


def select_action(state, eps):
    if random.random() > eps:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]])


def optimize_model():
    if len(memory) < BATCH:
        return
    state, action, reward, nxt, alive = map(torch.cat, zip(*random.sample(memory, BATCH)))
    q = policy_net(state).gather(1, action)
    with torch.no_grad():
        best = target_net(nxt).max(1).values * alive
    expected = best * GAMMA + reward
    loss = nn.functional.smooth_l1_loss(q, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


for episode in range(600):
    state, done = reset(), False
    while not done:
        action = select_action(state, eps=0.1)
        nxt, reward, done = act(action)
        memory.append((state, action, reward, nxt, torch.tensor([not done])))
        state = nxt
        optimize_model()
        for t, p in zip(target_net.parameters(), policy_net.parameters()):
            t.data.lerp_(p.data, TAU)
