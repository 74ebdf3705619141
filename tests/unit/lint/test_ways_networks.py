"""Ways to give an optimizer the wrong parameters.

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
        "SS604",
        """class T:
    def __init__(self):
        self.teacher = nn.Linear(2, 2)
        self.student = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.teacher.parameters(), lr=1e-3)
    def train(self):
        for x in loader:
            with torch.no_grad():
                t = self.teacher(x)
            loss = F.mse_loss(self.student(x), t)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
""",
    ),
    (
        "SS604",
        """def train(student, teacher, optimizer):
    for x in loader:
        with torch.no_grad():
            t = teacher(x)
        loss = F.mse_loss(student(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
def main():
    teacher = nn.Linear(2, 2)
    student = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    train(student, teacher, optimizer)
main()
""",
    ),
    (
        "SS601",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.Linear(2, 3)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
]

CLEAN = [
    """encoder, actor, critic = Encoder(), Actor(), Critic()
critic_target = Critic()
critic_target.load_state_dict(critic.state_dict())
actor_opt = torch.optim.Adam(list(encoder.parameters()) + list(actor.parameters()), lr=1e-4)
critic_opt = torch.optim.Adam(list(encoder.parameters()) + list(critic.parameters()), lr=1e-4)
for s, a, r, n in loader:
    target = r + critic_target(encoder(n)).detach()
    critic_loss = F.mse_loss(critic(encoder(s)), target)
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()
    actor_loss = -critic(actor(encoder(s))).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()
""",
    """gen, d1, d2 = Gen(), Disc(), Disc()
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-4)
opt_d = torch.optim.Adam([*d1.parameters(), *d2.parameters()], lr=1e-4)
for x in loader:
    opt_d.zero_grad()
    d_loss = (d1(x) + d2(x) - d1(gen(x).detach()) - d2(gen(x).detach())).mean()
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = (d1(gen(x)) + d2(gen(x))).mean()
    g_loss.backward()
    opt_g.step()
""",
    """model, target = Net(), Net()
target.load_state_dict(model.state_dict())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for s, r, n in loader:
    with torch.no_grad():
        q = target(n)
    loss = F.mse_loss(model(s), r + q)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    """backbone = Net()
head = nn.Linear(2, 2)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
for x, y in loader:
    with torch.no_grad():
        out = backbone(x)
    loss = F.cross_entropy(head(out), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    """class T:
    def __init__(self):
        self.backbone = Net()
        self.head = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=1e-3)
    def run(self):
        for x, y in loader:
            loss = F.cross_entropy(self.head(self.backbone(x)), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
""",
    """class T:
    def __init__(self):
        self.model = Net()
        self.ema_model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.net.parameters(), lr=1e-3)
    def run(self):
        for x, y in loader:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def compute_loss(x, y):
    return F.mse_loss(model(x), y)
total = 0.0
for x, y in loader:
    optimizer.zero_grad()
    loss = compute_loss(x, y)
    loss.backward()
    optimizer.step()
    total += loss.item()
""",
    """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
run(model, optimizer)
model = nn.Linear(2, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
run(model, optimizer)
""",
]


@pytest.mark.parametrize(("code", "text"), FAULTY)
def test_the_fault_is_found(code: str, text: str) -> None:
    assert [hit.code for hit in check_script(HEAD + text).faults] == [code]


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert [hit.message for hit in check_script(HEAD + text).faults] == []
