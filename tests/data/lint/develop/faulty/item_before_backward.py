import torch
from torch import nn

model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y).item()
    losses.append(loss)
    torch.tensor(loss, requires_grad=True).backward()
    optimizer.step()
