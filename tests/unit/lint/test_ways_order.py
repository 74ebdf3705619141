"""Ways to write a step without backward, a missing zero_grad, a kept graph, half precision without a scaler.

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
        "SS108",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    (
        "SS108",
        """gen, disc = nn.Linear(2,2), nn.Linear(2,2)
og = torch.optim.Adam(gen.parameters(), lr=1e-3)
optimizer_d = torch.optim.Adam(disc.parameters(), lr=1e-3)
for x in loader:
    og.zero_grad()
    optimizer_d.zero_grad()
    d_loss = disc(x).mean()
    d_loss.backward()
    optimizer_d.step()
    optimizer_d.zero_grad()
    og.zero_grad()
    g_loss = disc(gen(x)).mean()
    og.step()
""",
    ),
    (
        "SS108",
        """from accelerate import Accelerator
accelerator = Accelerator()
model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    optimizer.step()
    accelerator.print(loss.item())
""",
    ),
    (
        "SS106",
        """from accelerate import Accelerator
accelerator = Accelerator()
model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
""",
    ),
    (
        "SS109",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def step_loss(x, y):
    return F.cross_entropy(model(x), y)
for i, (x, y) in enumerate(loader):
    loss = step_loss(x, y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    (
        "SS109",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
huber = nn.SmoothL1Loss()
for i, (x, y) in enumerate(loader):
    loss = huber(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    (
        "SS202",
        """model = nn.Linear(2, 2).half().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS201",
        """model = nn.Linear(2, 2).to(torch.bfloat16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler()
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    (
        "SS110",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
for x, y in val_loader:
    pass
def other():
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
other()
""",
    ),
    (
        "SS105",
        """opts = {"main": torch.optim.Adam(model.parameters(), lr=1e-3)}
scheds = {"main": torch.optim.lr_scheduler.CosineAnnealingLR(opts["main"], 100)}
for i, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        opts["main"].step()
        opts["main"].zero_grad()
    scheds["main"].step()
""",
    ),
    (
        "SS201",
        """import argparse
ap = argparse.ArgumentParser()
ap.add_argument("--amp", action="store_true")
args = ap.parse_args()
model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.amp):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    (
        "SS202",
        """import argparse
ap = argparse.ArgumentParser()
ap.add_argument("--amp", action="store_true")
args = ap.parse_args()
model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
        loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS202",
        """class Net(nn.Module):
    @torch.cuda.amp.autocast()
    def forward(self, x):
        return self.fc(x)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS109",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1000):
    optimizer.zero_grad()
    for micro in range(8):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS109",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    sync = (i + 1) % 8 == 0
    if sync:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
]

CLEAN = [
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
use_amp = False
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
        loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1000):
    optimizer.zero_grad()
    for micro in range(8):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y) / 8
        loss.backward()
    optimizer.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1000):
    optimizer.zero_grad()
    for micro in range(8):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y, reduction="sum") / tokens
        loss.backward()
    optimizer.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    loss = es_estimate(model, x, y)
    for p, g in zip(model.parameters(), estimate_gradients(model, x, y)):
        p.grad = g
    optimizer.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    loss = compute_and_backward(model, x, y)
    optimizer.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.DataParallel(model)
model = torch.compile(model)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    """from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, loader, sched = accelerator.prepare(Net(), optimizer, loader, sched)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sched.step()
        optimizer.zero_grad()
    accelerator.log({"loss": loss.item()})
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def mean_loss(x, y):
    return F.cross_entropy(model(x), y, reduction="sum") / 4096
for i, (x, y) in enumerate(loader):
    loss = mean_loss(x, y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    """model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.half()
torch.save(model.state_dict(), "m.pt")
""",
]


@pytest.mark.parametrize(("code", "text"), FAULTY)
def test_the_fault_is_found(code: str, text: str) -> None:
    assert [hit.code for hit in check_script(HEAD + text).faults] == [code]


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert [hit.message for hit in check_script(HEAD + text).faults] == []
