"""Ways to keep the graphs of all batches: sums, lists, meters, losses that are handed back.

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
        "SS302",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def train_step(x, y):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
total = 0.0
for x, y in loader:
    total += train_step(x, y)
""",
    ),
    (
        "SS302",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
total = 0.0
for x, y in loader:
    ce = F.mse_loss(model(x), y)
    kl = model(x).mean()
    loss = ce + 0.1 * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += ce
""",
    ),
    (
        "SS302",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0, 0
    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
meter = AverageMeter()
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.update(loss, x.size(0))
""",
    ),
    (
        "SS302",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
hist = {"loss": []}
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hist["loss"].append(loss)
""",
    ),
    (
        "SS302",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    (loss / 4).backward()
    optimizer.step()
    losses += [loss]
""",
    ),
    (
        "SS302",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
outs = []
for x, y in loader:
    out = model(x)
    loss = F.mse_loss(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outs.append(out)
""",
    ),
    (
        "SS302",
        """class M(pl.LightningModule):
    def training_step(self, batch, i):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss)
        return loss
""",
    ),
]

CLEAN = [
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0
    def update(self, v, n):
        self.sum += v.item() * n
        self.n += n
meter = Meter()
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.update(loss, 3)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0
    def update(self, v, n):
        if torch.is_tensor(v):
            v = v.item()
        self.sum += v * n
meter = Meter()
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.update(loss, 3)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
class Meter:
    def __init__(self):
        self.last = None
        self.window = deque(maxlen=9)
    def update(self, v):
        self.last = v
        self.window.append(v)
meter = Meter()
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.update(loss)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
class Log:
    def __init__(self):
        self.values = []
    def push(self, v):
        self.values.append(v)
    def flush(self):
        out = sum(self.values)
        self.values.clear()
        return out
log = Log()
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.push(loss)
    if step % 50 == 0:
        print(log.flush())
""",
    """optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def step(model, x, y, state):
    out, state = model(x, state)
    return F.cross_entropy(out, y), tuple(s.detach() for s in state)
state = None
for x, y in loader:
    loss, state = step(model, x, y, state)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def train_step(x, y):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
total = 0.0
for x, y in loader:
    total += train_step(x, y)
""",
    """class M(pl.LightningModule):
    def training_step(self, batch, i):
        g, d = self.optimizers()
        self.toggle_optimizer(g)
        loss_g = self.gen_loss(batch)
        g.zero_grad()
        self.manual_backward(loss_g)
        g.step()
        self.untoggle_optimizer(g)
        self.toggle_optimizer(d)
        loss_d = self.disc_loss(batch)
        d.zero_grad()
        self.manual_backward(loss_d)
        d.step()
        self.untoggle_optimizer(d)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ema = 0.0
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema = 0.9 * ema + 0.1 * loss.item()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
outs, losses = [], []
for x, y in loader:
    out = model(x)
    loss = F.mse_loss(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outs.append(out.detach().cpu())
""",
    """class M(pl.LightningModule):
    def training_step(self, batch, i):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss
""",
]


@pytest.mark.parametrize(("code", "text"), FAULTY)
def test_the_fault_is_found(code: str, text: str) -> None:
    assert [hit.code for hit in check_script(HEAD + text).faults] == [code]


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert [hit.message for hit in check_script(HEAD + text).faults] == []
