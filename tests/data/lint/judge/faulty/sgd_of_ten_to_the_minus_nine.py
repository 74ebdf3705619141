import torch
from torch import nn

config = dict(lr=1e-9, epochs=10)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
for _ in range(config["epochs"]):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
