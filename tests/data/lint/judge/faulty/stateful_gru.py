import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, x, state=None):
        y, state = self.rnn(x, state)
        return self.out(y), state


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(10):
    state = torch.zeros(1, 16, 32)
    for window, target in windows():
        prediction, state = model(window, state)
        loss = nn.functional.mse_loss(prediction, target)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
