import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, x):
        return self.layers(x).squeeze(1)


net = Detector()
loss_function = nn.BCEWithLogitsLoss()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(100):
    for x, y in loader:
        opt.zero_grad()
        loss = loss_function(net(x), y)
        loss.backward()
        opt.step()
