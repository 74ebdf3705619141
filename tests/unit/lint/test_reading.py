"""Code that was misread on public repositories: chains, detached factors, single steps, sweeps, branches, totals.

Each fault next to the code that only looks like it.
"""

from pathlib import Path

import pytest

from steadystep import ConfigError
from steadystep.lint import check_script
from steadystep.lint.check import check_path
from steadystep.lint.fix import fix_file

HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F
from data import loader, val_loader, device
"""

FAULTY = {
    "eval() through a chain, and never back": (
        "SS403",
        """
model = nn.Sequential(nn.Linear(2,2), nn.Dropout())
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model.to(device).train()
for e in range(3):
    for x,y in loader:
        opt.zero_grad(); loss=F.mse_loss(model(x),y); loss.backward(); opt.step()
    model.to(device).eval()
    with torch.no_grad():
        for x,y in val_loader:
            print(F.mse_loss(model(x),y).item())
""",
    ),
    "a constant times a detached loss": (
        "SS301",
        """
model = nn.Linear(2,2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x,y in loader:
    opt.zero_grad()
    loss = 0.5 * F.mse_loss(model(x),y).detach()
    loss.backward(); opt.step()
""",
    ),
    "a step function is the body of a loop": (
        "SS102",
        """
def train_step(model, opt, x, y):
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()
""",
    ),
    "an object with its own optimizer": (
        "SS106",
        """
class Agent:
    def __init__(self):
        self.net = nn.Linear(2,2)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
    def update(self, x, y):
        loss = F.mse_loss(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()
""",
    ),
    "a scaler or none, clipped while scaled": (
        "SS101",
        """
def run(model, opt, scaler):
    for x,y in loader:
        opt.zero_grad()
        loss=F.mse_loss(model(x),y)
        if scaler:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
""",
    ),
    "a scaler or none, never updated": (
        "SS203",
        """
def run(model, opt, scaler):
    for x,y in loader:
        opt.zero_grad()
        loss=F.mse_loss(model(x),y)
        if scaler:
            scaler.scale(loss).backward()
            scaler.step(opt)
        else:
            loss.backward()
            opt.step()
""",
    ),
    "fabric clips after the step": (
        "SS102",
        """
from lightning.fabric import Fabric
fabric = Fabric(); model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model, opt = fabric.setup(model, opt)
for x,y in loader:
    loss=F.mse_loss(model(x),y)
    fabric.backward(loss)
    opt.step()
    fabric.clip_gradients(model, opt, max_norm=1.0)
    opt.zero_grad()
""",
    ),
    "fabric goes back through a detached loss": (
        "SS301",
        """
from lightning.fabric import Fabric
fabric = Fabric(); model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model, opt = fabric.setup(model, opt)
for x,y in loader:
    loss=F.mse_loss(model(x),y).detach()
    fabric.backward(loss)
    opt.step()
    opt.zero_grad()
""",
    ),
    "fabric does not divide": (
        "SS109",
        """
from lightning.fabric import Fabric
fabric = Fabric(); model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model, opt = fabric.setup(model, opt)
for i,(x,y) in enumerate(loader):
    loss=F.mse_loss(model(x),y)
    fabric.backward(loss)
    if (i+1) % 4 == 0:
        opt.step()
        opt.zero_grad()
""",
    ),
    "a sum over an epoch": (
        "SS302",
        """
model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for e in range(3):
    running = 0.0
    for i,(x,y) in enumerate(loader):
        opt.zero_grad()
        loss=F.mse_loss(model(x),y)
        loss.backward(); opt.step()
        running += loss
    print(running)
""",
    ),
    "options that are called opt": (
        "SS106",
        """
from options import parse, validate
opt = parse()
model = nn.Linear(opt.width, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while True:
    loss = F.mse_loss(model(torch.ones(opt.batch, 2)), torch.ones(opt.batch, 2))
    loss.backward()
    optimizer.step()
    validate(model, opt)
""",
    ),
    "a criterion that is moved": (
        "SS303",
        """
def build():
    model, criterion = nn.Linear(2, 2), nn.CrossEntropyLoss()
    if torch.cuda.is_available():
        criterion = criterion.cuda()
    return model, criterion
def train(model, criterion, opt):
    for x, y in loader:
        loss = criterion(model(x).softmax(dim=1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
model, criterion = build()
train(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-3))
""",
    ),
    "a name that only begins like an optimization": (
        "SS108",
        """
from optimizers import smart_optimizer
model = nn.Linear(2, 2)
optimizer = smart_optimizer(model)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "names of the test loop": (
        "SS110",
        """
model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    out = model(x)
    loss = F.mse_loss(out, y)
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()
with torch.no_grad():
    for x, y in val_loader:
        out = model.eval()(x)
        print(out.argmax())
""",
    ),
}

CLEAN = {
    "gradients on or off, and a bar around either data": """
from tqdm import tqdm
def one_epoch(net, data, optimizer):
    training = optimizer is not None
    net.train() if training else net.eval()
    bar, total = tqdm(data), 0.0
    with (torch.enable_grad() if training else torch.no_grad()):
        for x, y in bar:
            loss = F.mse_loss(net(x), y)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item()
    return total
model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    train_loss = one_epoch(model, loader, opt)
    test_loss = one_epoch(model, val_loader, None)
""",
    "a wrapper that clears and steps what it holds": """
class Scheduled:
    def __init__(self, optimizer):
        self._optimizer = optimizer
    def update(self):
        self._optimizer.step()
    def zero_grad(self):
        self._optimizer.zero_grad()
class Trainer:
    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.optim = Scheduled(torch.optim.Adam(self.model.parameters(), lr=1e-3))
    def fit(self):
        for x, y in loader:
            loss = F.mse_loss(self.model(x), y)
            self.optim.zero_grad()
            loss.backward()
            self.optim.update()
""",
    "a head trained on frozen features, in eval mode": """
def train(model, opt):
    model.eval()
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
def validate(model):
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            print(F.mse_loss(model(x), y).item())
def main():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        train(model, opt)
        validate(model)
main()
""",
    "a trained weight and a detached rest": """
log_alpha = torch.zeros(1, requires_grad=True)
alpha = log_alpha.exp()
opt = torch.optim.Adam([log_alpha], lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    alpha_loss = (log_alpha.exp() * (-x - 1.0).detach()).mean()
    loss = (alpha * (-x - 1.0).detach()).mean()
    (alpha_loss + loss).backward()
    opt.step()
class Agent:
    def update(self, x):
        self.optimizer.zero_grad()
        loss = (self.alpha * (-x - self.target).detach()).mean()
        loss.backward()
        self.optimizer.step()
""",
    "a range test with a schedule of its own": """
from torch.optim.lr_scheduler import _LRScheduler
class FindRate(_LRScheduler):
    def get_lr(self):
        return [rate * 2 ** self.last_epoch for rate in self.base_lrs]
model = nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=1e-7)
schedule = FindRate(opt)
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    schedule.step()
""",
    "a network with a name of its own": """
class Learner(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.encoder = net
    def forward(self, x):
        projector = self.make(x)
        return projector(self.encoder(x)).sum()
learner = Learner(nn.Linear(2, 2))
opt = torch.optim.Adam(learner.parameters(), lr=3e-4)
loss = learner(torch.ones(2, 2))
opt.zero_grad()
loss.backward()
opt.step()
""",
    "back to train() through a chain": """
model = nn.Sequential(nn.Linear(2,2), nn.Dropout())
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for e in range(3):
    for x,y in loader:
        opt.zero_grad(); loss=F.mse_loss(model(x),y); loss.backward(); opt.step()
    model.eval().cpu()
    torch.save(model.state_dict(), "a.pt")
    model.to(device).train()
""",
    "eval() at the end of a chain": """
model = nn.Sequential(nn.Linear(2,2), nn.Dropout())
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
def evaluate():
    net = model.to(device).eval()
    tot=0
    with torch.no_grad():
        for x,y in val_loader:
            tot += F.mse_loss(net(x),y).item()
    return tot
for e in range(3):
    model.to(device).train()
    for x,y in loader:
        opt.zero_grad(); loss=F.mse_loss(model(x),y); loss.backward(); opt.step()
    print(evaluate())
""",
    "a detached weight": """
model = nn.Linear(2,2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x,y in loader:
    opt.zero_grad()
    per = F.mse_loss(model(x),y,reduction="none")
    w = per.detach()
    loss = (w * per).mean()
    loss.backward(); opt.step()
""",
    "a ratio of two losses as a weight": """
model = nn.Linear(2,2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x,y in loader:
    opt.zero_grad()
    a_loss = F.mse_loss(model(x),y); b_loss = F.l1_loss(model(x),y)
    loss = a_loss + b_loss * (a_loss.item() / b_loss.item())
    loss.backward(); opt.step()
""",
    "one factor of two is detached": """
model = nn.Linear(2,2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x,y in loader:
    opt.zero_grad()
    a_loss = F.mse_loss(model(x),y); b_loss = F.l1_loss(model(x),y)
    loss = a_loss.detach() * b_loss
    loss.backward(); opt.step()
""",
    "detached weights in a sum": """
model = nn.Linear(2,2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x,y in loader:
    opt.zero_grad()
    losses = [F.mse_loss(model(x),y), F.l1_loss(model(x),y)]
    loss = sum(l.detach() * l for l in losses)
    loss.backward(); opt.step()
""",
    "one step without a loop": """
model = nn.Linear(2,2)
x=torch.randn(3,requires_grad=True); y=(x**2).sum(); y.backward()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
loss = model(torch.randn(3,2)).sum()
loss.backward()
opt.step()
""",
    "a step function whose caller may clear": """
def train_step(model, opt, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.item()
""",
    "a sweep over rates with a new network in each pass": """
results = {}
for lr in [1e-6, 1e-4, 1e-2, 1.0, 10.0]:
    model = nn.Linear(2,2)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for x,y in loader:
        opt.zero_grad(); loss=F.mse_loss(model(x),y); loss.backward(); opt.step()
    model.eval()
    results[lr] = loss.item()
""",
    "a sweep through a function": """
def train(lr):
    model = nn.Sequential(nn.Linear(2,2), nn.Dropout()).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for e in range(3):
        model.train()
        for x,y in loader:
            opt.zero_grad(); loss=F.mse_loss(model(x),y); loss.backward(); opt.step()
    model.eval()
    return loss.item()
for lr in (1e-3, 1e2, 1e3): train(lr)
""",
    "one step for each rate": """
for lr in torch.logspace(-5, 1, 50):
    model = nn.Linear(2,2)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    loss = F.mse_loss(model(torch.ones(3,2)), torch.ones(3,2))
    loss.backward()
    opt.step()
""",
    "a scaler or none": """
def run(model, opt, scaler=None):
    for x,y in loader:
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss=F.mse_loss(model(x),y)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is not None:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
""",
    "a scaler or none, in expressions": """
def run(model, opt, scaler):
    for x,y in loader:
        opt.zero_grad()
        loss=F.mse_loss(model(x),y)
        if scaler:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if scaler: scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt) if scaler else opt.step()
        if scaler: scaler.update()
""",
    "a scaler or none, one backward": """
def run(model, opt, use_amp):
    scaler = torch.amp.GradScaler() if use_amp else None
    for x,y in loader:
        opt.zero_grad()
        loss=F.mse_loss(model(x),y)
        (scaler.scale(loss) if scaler else loss).backward()
        if use_amp:
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if use_amp:
            scaler.step(opt); scaler.update()
        else:
            opt.step()
""",
    "fabric in order": """
from lightning.fabric import Fabric
fabric = Fabric(); model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model, opt = fabric.setup(model, opt)
for x,y in loader:
    loss=F.mse_loss(model(x),y)
    fabric.backward(loss)
    fabric.clip_gradients(model, opt, max_norm=1.0)
    opt.step()
    opt.zero_grad()
""",
    "an engine steps by itself": """
import deepspeed
engine, opt, _, _ = deepspeed.initialize(model=nn.Linear(2,2), config={})
for x,y in loader:
    loss=F.mse_loss(engine(x),y)
    engine.backward(loss)
    engine.step()
""",
    "a sum that begins anew": """
model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
running = 0.0
for i,(x,y) in enumerate(loader):
    opt.zero_grad()
    loss=F.mse_loss(model(x),y)
    loss.backward(); opt.step()
    running += loss
    if i % 100 == 99:
        print(running / 100)
        running = 0.0
""",
    "a sum that a method resets": """
class T:
    def fit(self):
        self.running = 0.0
        for i,(x,y) in enumerate(loader):
            self.opt.zero_grad()
            loss=F.mse_loss(self.model(x),y)
            loss.backward(); self.opt.step()
            self.running += loss
            if i % 100 == 99:
                self.log()
    def log(self):
        print(self.running / 100)
        self.running = 0.0
""",
    "a list that is emptied": """
model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
hist = []
for i,(x,y) in enumerate(loader):
    opt.zero_grad()
    loss=F.mse_loss(model(x),y)
    loss.backward(); opt.step()
    hist.append(loss)
    if len(hist) == 50:
        print(torch.stack(hist).mean())
        hist = []
""",
    "a sum for one backward": """
model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
total = 0
for i,(x,y) in enumerate(loader):
    total = total + F.mse_loss(model(x),y)
    if (i+1) % 4 == 0:
        opt.zero_grad()
        (total/4).backward()
        opt.step()
        total = 0
""",
    "an imported function that clears": """
from helpers import zero_grad
model = nn.Linear(2,2); opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for i,(x,y) in enumerate(loader):
    zero_grad(model.parameters())
    loss = F.mse_loss(model(x),y)
    loss.backward(); opt.step()
""",
}


@pytest.mark.parametrize("name", FAULTY)
def test_the_fault_is_found(name: str) -> None:
    code, text = FAULTY[name]
    assert [hit.code for hit in check_script(HEAD + text).faults] == [code]


@pytest.mark.parametrize("name", CLEAN)
def test_what_only_looks_like_it_is_silent(name: str) -> None:
    assert not check_script(HEAD + CLEAN[name]).hits


LATE_CLIP = """# -*- coding: latin-1 -*-
import torch
def train(model, loader, optimizer):
    for x, y in loader:  # caf\xe9
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""


def test_a_script_is_read_and_fixed_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(LATE_CLIP.encode("latin-1"))
    assert [hit.code for report in check_path(path) for hit in report.faults] == ["SS102"]
    assert fix_file(path).applied
    assert "caf\xe9".encode("latin-1") in path.read_bytes()


@pytest.mark.parametrize("first", [b"", b"# coding: utf-8\n", b"# coding: rot13\n", b"# coding: nothing\n"])
def test_another_encoding_than_declared_is_named(first: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(first + b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="not a UTF-8 text file"):
        list(check_path(path))


def test_python_2_is_called_so() -> None:
    with pytest.raises(ConfigError, match="Python 2 is not supported"):
        check_script('print "loss", loss\n')
