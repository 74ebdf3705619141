import torch
from torch import nn

gru = nn.GRU(8, 64, batch_first=True)
head = nn.Linear(64, 1)
params = list(gru.parameters()) + list(head.parameters())
optimizer = torch.optim.RMSprop(params, lr=1e-3)

for sequence, target in loader:
    optimizer.zero_grad(set_to_none=True)
    states, _ = gru(sequence)
    loss = (head(states[:, -1]).squeeze(-1) - target).square().mean()
    torch.nn.utils.clip_grad_value_(params, 0.5)
    loss.backward()
    optimizer.step()
