"""Ways to write a number that is far off, a decay on norms, a filter that hides NaN.

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
        "SS505",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
running = 0.0
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not torch.isnan(loss):
        running += loss.item()
""",
    ),
    (
        "SS505",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
import numpy as np
losses = []
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(np.nanmean(losses))
""",
    ),
    (
        "SS505",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
running = 0.0
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    if math.isfinite(value):
        running += value
""",
    ),
    (
        "SS505",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
running = 0.0
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    running += value if value == value else 0.0
""",
    ),
    (
        "SS505",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if math.isnan(loss.item()):
        continue
    writer.add_scalar("loss", loss.item(), step)
""",
    ),
    (
        "SS501",
        """model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=8)
cos = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50000)
sched = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cos], [8])
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sched.step()
""",
    ),
    (
        "SS501",
        """WARM, TOTAL = 10, 50000
model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def lr_at(it):
    if it < WARM:
        return 1e-3 * (it + 1) / WARM
    return 1e-3
for it in range(TOTAL):
    for g in optimizer.param_groups:
        g["lr"] = lr_at(it)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    (
        "SS502",
        """from dataclasses import dataclass
@dataclass
class Config:
    lr: float = 0.8
cfg = Config()
model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
""",
    ),
    (
        "SS502",
        """from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained("x")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
""",
    ),
    (
        "SS504",
        """decay, no_decay = [], []
model = nn.Linear(2, 2)
for n, p in model.named_parameters():
    (no_decay if p.ndim < 2 else decay).append(p)
optimizer = torch.optim.AdamW([{"params": decay}, {"params": no_decay}], lr=1e-3, weight_decay=0.1)
""",
    ),
    (
        "SS504",
        """no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.01},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
""",
    ),
    (
        "SS504",
        """norms = [p for n, p in model.named_parameters() if "norm" in n]
rest = [p for n, p in model.named_parameters() if "norm" not in n]
optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.1}], lr=1e-3)
""",
    ),
    (
        "SS503",
        """import pytorch_lightning as pl
trainer = pl.Trainer(gradient_clip_val=1e6)
""",
    ),
    (
        "SS501",
        """args = TrainingArguments("out", warmup_steps=5, max_steps=100000)
""",
    ),
]

CLEAN = [
    """args = TrainingArguments("out", warmup_steps=5, max_steps=60)
more = TrainingArguments("out", warmup_steps=10, num_train_epochs=3)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
running, bad = 0.0, 0
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    if not torch.isfinite(loss):
        continue
    loss.backward()
    optimizer.step()
    running += loss.item()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
running, bad = 0.0, 0
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if torch.isfinite(loss):
        running += loss.item()
    else:
        bad += 1
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
class Meter:
    def push(self, v):
        if not math.isfinite(v):
            self.skipped += 1
            return
        self.total += v
meter = Meter()
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.push(loss.item())
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
class Meter:
    def push(self, v):
        if math.isnan(v):
            raise RuntimeError("nan")
        self.total += v
meter = Meter()
for step, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.push(loss.item())
""",
    """decay = [p for p in model.parameters() if p.ndim >= 2]
no_decay = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
""",
    """body = {"params": model.backbone.parameters(), "weight_decay": 0.1}
optimizer = torch.optim.AdamW([body, {"params": model.norm_head.parameters(), "weight_decay": 0.1}], lr=1e-3)
""",
    """emb = [p for n, p in model.named_parameters() if "emb" in n]
rest = [p for n, p in model.named_parameters() if "emb" not in n]
optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": emb, "weight_decay": 0.01}], lr=1e-3)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
noam = lambda s: 512 ** -0.5 * min((s + 1) ** -0.5, (s + 1) * 4000 ** -1.5)
sched = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2.0)
sched = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)
""",
    """import argparse
ap = argparse.ArgumentParser()
ap.add_argument("--lr", type=float, required=True)
ap.add_argument("--clip", type=float, default=1.0)
ap.add_argument("--warmup-steps", type=int, default=2000)
args = ap.parse_args()
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
""",
    """model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: (epoch + 1) / 5 if epoch < 5 else 1.0)
for epoch in range(90):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sched.step()
""",
    """model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
for epoch in range(90):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    warm.step()
""",
    """model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    x = torch.nan_to_num(x)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
ious = compute_iou(model)
print(np.nanmean(ious))
""",
]


@pytest.mark.parametrize(("code", "text"), FAULTY)
def test_the_fault_is_found(code: str, text: str) -> None:
    assert [hit.code for hit in check_script(HEAD + text).faults] == [code]


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert [hit.message for hit in check_script(HEAD + text).faults] == []
