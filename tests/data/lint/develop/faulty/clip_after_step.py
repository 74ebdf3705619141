import torch
from torch import nn, optim

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
opt = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for step in range(1000):
    data = torch.randn(64, 32)
    target = torch.randint(0, 10, (64,))
    opt.zero_grad()
    loss = criterion(model(data), target)
    loss.backward()
    opt.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if step % 100 == 0:
        print(step, loss.item())
