import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.to("cuda")
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x.to("cuda")), y.to("cuda"))
    loss.backward()
    optimizer.step()
