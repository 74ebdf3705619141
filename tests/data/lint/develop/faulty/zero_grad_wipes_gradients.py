import torch
from torch import nn

net = nn.Linear(10, 1)
optim = torch.optim.Adam(net.parameters(), lr=1e-3)
mse = nn.MSELoss()
for epoch in range(20):
    for x, y in batches():
        loss = mse(net(x), y)
        loss.backward()
        optim.zero_grad()
        optim.step()
