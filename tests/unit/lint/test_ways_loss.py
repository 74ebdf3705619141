"""Ways to cut a loss from its graph, to put a softmax before it, to carry a hidden state.

Each fault as different people write it, then what looks like it and is right.
"""

import pytest

from steadystep.lint import check_script

HEAD = """import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from data import loader, train_loader, val_loader
"""

FAULTY = [
    (
        "SS304",
        """def crit(p, y):
    return F.binary_cross_entropy_with_logits(p, y)
net = nn.Linear(2, 2)
for x, y in loader:
    loss = crit(torch.sigmoid(net(x)), y)
""",
    ),
    (
        "SS303",
        """def build():
    return nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1))
net = build().to("cuda")
crit = nn.CrossEntropyLoss()
for x, y in loader:
    loss = crit(net(x), y)
""",
    ),
    (
        "SS303",
        """class Net(nn.Module):
    def forward(self, x, h):
        o, h = self.rnn(x, h)
        return torch.softmax(self.fc(o), -1), h
net = Net()
crit = nn.CrossEntropyLoss()
for x, y in loader:
    out, h = net(x, None)
    loss = crit(out.flatten(0, 1), y)
""",
    ),
    (
        "SS303",
        """class Net(nn.Module):
    def forward(self, x):
        return {"logits": torch.softmax(self.fc(x), -1)}
net = Net()
for x, y in loader:
    out = net(x)
    loss = F.cross_entropy(out["logits"], y)
""",
    ),
    (
        "SS303",
        """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(2, 2)]
        layers.append(nn.Softmax(dim=-1))
        self.net = nn.Sequential(*layers)
    def forward(self, x):
        return self.net(x)
net = Net()
for x, y in loader:
    loss = F.cross_entropy(net(x), y)
""",
    ),
    (
        "SS303",
        """class Net(nn.Module):
    def forward(self, x):
        x = self.fc(x)
        x = F.softmax(x, dim=1)
        return x
def train(model, criterion):
    for x, y in loader:
        loss = criterion(model(x), y)
def run(model, criterion):
    for x, y in loader:
        loss = criterion(model(x), y)
net = Net()
c = nn.CrossEntropyLoss()
train(net, c)
train(net, c)
""",
    ),
    (
        "SS306",
        """class LM(nn.Module):
    pass
model = LM()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
h, c = torch.zeros(2), torch.zeros(2)
for x, y in loader:
    optimizer.zero_grad()
    out, (h, c) = model(x, (h, c))
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    print(loss.detach())
""",
    ),
    (
        "SS306",
        """class T:
    def __init__(self):
        self.model = LM()
        self.hidden = None
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
    def run(self):
        for x, y in loader:
            self.optimizer.zero_grad()
            out, self.hidden = self.model(x, self.hidden)
            loss = F.cross_entropy(out, y)
            loss.backward()
            self.optimizer.step()
""",
    ),
    (
        "SS306",
        """model = nn.GRU(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def forward(model, x, state):
    out, state = model(x, state)
    return out.mean(), state
state = None
for x, y in loader:
    optimizer.zero_grad()
    loss, state = forward(model, x, state)
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS301",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    with torch.no_grad():
        out = model(x)
    loss = F.mse_loss(out, y)
    loss.requires_grad_(True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS301",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss_value = loss.item()
    optimizer.zero_grad()
    torch.tensor(loss_value, requires_grad=True).backward()
    optimizer.step()
""",
    ),
    (
        "SS301",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    out = model(x).detach()
    loss = F.mse_loss(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS301",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    total = F.mse_loss(model(x), y)
    loss = torch.tensor(total, requires_grad=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
]

CLEAN = [
    """class Net2(nn.Module):
    def forward(self, x):
        logits = self.fc(x)
        return logits, torch.softmax(logits, -1)
net = Net2()
for x, y in loader:
    logits, probs = net(x)
    loss = F.cross_entropy(logits, y)
    out = net(x)
    loss2 = F.cross_entropy(out[0], y)
""",
    """class Net2(nn.Module):
    def forward(self, x):
        w = torch.softmax(self.a(x), -1)
        return (w * self.fc(x)).sum(1)
net = Net2()
for x, y in loader:
    loss = F.cross_entropy(net(x)[:, 0], y)
""",
    """optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
h, c = zeros(), zeros()
for x, y in loader:
    h, c = h.detach(), c.detach()
    out, (h, c) = model(x, (h, c))
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
]


@pytest.mark.parametrize(("code", "text"), FAULTY)
def test_the_fault_is_found(code: str, text: str) -> None:
    assert [hit.code for hit in check_script(HEAD + text).faults] == [code]


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert [hit.message for hit in check_script(HEAD + text).faults] == []
