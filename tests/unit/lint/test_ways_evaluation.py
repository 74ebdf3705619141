"""Ways to evaluate in the wrong mode, with a graph, or on the training data.

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
        "SS401",
        """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def evaluate(model, loader):
    total = 0
    for x, y in loader:
        total += (model(x).argmax(1) == y).sum().item()
    return total
for epoch in range(3):
    model.train()
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(evaluate(model, val_loader))
""",
    ),
    (
        "SS401",
        """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
@torch.no_grad()
def perplexity(model, loader):
    return sum(model(x).mean().item() for x, y in loader)
for epoch in range(3):
    model.train()
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(perplexity(model, val_loader))
""",
    ),
    (
        "SS402",
        """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def estimate(model):
    model.eval()
    out = []
    for i in range(20):
        x, y = get_batch("val")
        out.append(F.mse_loss(model(x), y).item())
    model.train()
    return sum(out)
for epoch in range(3):
    model.train()
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(estimate(model))
""",
    ),
    (
        "SS402",
        """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(g)[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    logits = model(g)
    acc = (logits.argmax(1)[val_mask] == y[val_mask]).float().mean().item()
""",
    ),
    (
        "SS404",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def run(model, loader, train):
    pass
val_ds = load("val")
train_ds = load("train")
train_dl = torch.utils.data.DataLoader(train_ds)
val_dl = torch.utils.data.DataLoader(train_ds)
for x, y in train_dl:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS404",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        return sum(model(x).mean().item() for x, y in loader)
for x, y in train_loader:
    model.train()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"val acc {evaluate(model, train_loader):.3f}")
""",
    ),
    (
        "SS404",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in train_loader:
            correct += (model(x).argmax(1) == y).sum().item()
    print(f"val acc {correct / 100:.3f}")
""",
    ),
    (
        "SS403",
        """class T:
    def __init__(self):
        self.model = Net()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-3)
    def validate(self):
        self.model.eval()
        with torch.no_grad():
            return sum(self.model(x).mean().item() for x, y in val_loader)
    def fit(self):
        self.model.train()
        for epoch in range(9):
            for x, y in loader:
                loss = F.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.validate()
""",
    ),
    (
        "SS404",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        return sum(model(x).mean().item() for x, y in data)
for x, y in loaders["train"]:
    model.train()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
val_acc = evaluate(model, loaders["train"])
""",
    ),
    (
        "SS404",
        """from transformers import Trainer
trainer = Trainer(model=model, train_dataset=train_ds, eval_dataset=train_ds)
trainer.train()
""",
    ),
    (
        "SS404",
        """trainer = pl.Trainer(max_epochs=3)
trainer.fit(model, train_loader, train_loader)
""",
    ),
    (
        "SS404",
        """class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(self.train_ds, shuffle=True)
    def val_dataloader(self):
        return DataLoader(self.train_ds)
""",
    ),
]

CLEAN = [
    """trainer = Trainer(model=model, train_dataset=ds["train"], eval_dataset=ds["validation"])
fitter = pl.Trainer(max_epochs=3)
fitter.fit(model, train_loader, val_loader)
class Data(pl.LightningDataModule):
    def val_dataloader(self):
        return DataLoader(self.val_ds)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    train_acc, val_acc = accuracy(model, train_loader), accuracy(model, val_loader)
    print(f"train {accuracy(model, train_loader):.3f} val {accuracy(model, val_loader):.3f}")
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def evaluate(model, loader):
    with torch.no_grad():
        return sum(model(x).mean().item() for x, y in loader)
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    print(evaluate(model, val_loader))
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def attack(model, x, y):
    model.eval()
    x = x.clone().requires_grad_(True)
    out = model(x)
    loss = F.mse_loss(out, y)
    g = torch.autograd.grad(loss, x)[0]
    return out.argmax(1), g
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    """train_set, val_set = load("train"), load("val")
train_eval_loader = torch.utils.data.DataLoader(train_set)
val_loader = torch.utils.data.DataLoader(train_set, sampler=val_sampler)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
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
