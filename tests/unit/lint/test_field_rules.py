"""Rules about modes, hooks, ranks, workers, checkpoints, logarithms and numpy: hit and silence."""

import pytest

from steadystep.lint import RULES, check_script

HEAD = """import torch
import numpy as np
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from data import loader, val_loader, device, dataset, args
"""

FAULTY = {
    "SS701 never set": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
sampler = DistributedSampler(dataset)
train_loader = DataLoader(dataset, sampler=sampler)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "SS701 written into the call": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
train_loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "SS702 isnan": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    if torch.isnan(loss):
        print("skipped a batch")
        continue
    loss.backward()
    opt.step()
""",
    "SS702 not finite": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
import math
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    if not math.isfinite(loss.item()):
        print("skipped a batch")
        continue
    loss.backward()
    opt.step()
""",
    "SS702 nan or inf": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    if torch.isnan(loss).any() or torch.isinf(loss).any():
        print("skipped a batch")
        break
    loss.backward()
    opt.step()
""",
    "SS703 a generator": """class Pictures(Dataset):
    def __init__(self, files):
        self.files = files
        self.rng = np.random.default_rng(0)
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return self.files[i] + self.rng.normal()
train_loader = DataLoader(Pictures(args.files), batch_size=8, num_workers=4)
model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "SS703 a random state": """class Pictures(Dataset):
    def __init__(self, files):
        self.files = files
        self.rng = np.random.RandomState(1)
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return self.files[i] + self.rng.normal()
data = Pictures(args.files)
train_loader = DataLoader(data, batch_size=8, num_workers=2)
model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "SS704 position and weights": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
state = torch.load("last.pt")
model.load_state_dict(state["model"])
start = state["epoch"]
for epoch in range(start, 3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
""",
    "SS704 through a name": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
state = torch.load("last.pt")
model.load_state_dict(state["model"])
start = state["epoch"]
for epoch in range(start, 3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    table = {"model": model.state_dict(), "epoch": epoch}
    torch.save(table, "last.pt")
""",
    "SS111 clipped after hooks": """model = nn.Linear(2, 2)
opts = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}
def hook(p):
    opts[p].step()
    opts[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "SS111 lambda": """model = nn.Linear(2, 2)
opts = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: (opts[p].step(), opts[p].zero_grad()))
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "SS112 no train()": """import schedulefree
model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
opt = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    model.eval()
    opt.eval()
    with torch.no_grad():
        for x, y in val_loader:
            print(F.mse_loss(model(x), y).item())
""",
    "SS112 no eval()": """import schedulefree
model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
opt = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    opt.train()
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            print(F.mse_loss(model(x), y).item())
""",
    "SS605 matrices only": """from muon import Muon
model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
opt = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "SS605 through a name": """from muon import Muon
model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
hidden = [p for p in model.parameters() if p.dim() >= 2]
opt = Muon(hidden, lr=0.02)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "SS606 a letter is missing": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for p in model.parameters():
    p.require_grad = False
""",
    "SS606 the method is overwritten": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for p in model.parameters():
    p.requires_grad_ = False
""",
    "SS606 compared": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for p in model.parameters():
    p.requires_grad == False
""",
    "SS606 a keyword": """w = torch.zeros(3, require_grad=True)
""",
    "SS307 of a softmax": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    loss = -(y * torch.log(F.softmax(model(x), dim=1))).sum()
    loss.backward()
    opt.step()
""",
    "SS307 a method": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    loss = -(y * model(x).softmax(-1).log()).sum()
    loss.backward()
    opt.step()
""",
    "SS307 of a name": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    p = torch.sigmoid(model(x))
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
    loss.backward()
    opt.step()
""",
    "SS308 from numpy": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    out = model(x).detach().cpu().numpy()
    out = torch.from_numpy(out).requires_grad_()
    loss = F.mse_loss(out, y)
    loss.backward()
    opt.step()
""",
    "SS308 in the first arm": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    if args.amp:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
            loss = F.mse_loss(torch.tensor(out.detach().numpy(), requires_grad=True), y)
    else:
        out = model(x)
        loss = F.mse_loss(out, y)
    loss.backward()
    opt.step()
""",
    "SS308 smoothed in numpy": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    pred = model(x)
    smooth = np.convolve(pred.detach().numpy(), np.ones(3))
    fixed = torch.tensor(smooth, requires_grad=True)
    loss = F.mse_loss(fixed, y)
    loss.backward()
    opt.step()
""",
}

CLEAN = {
    "set at each epoch": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
sampler = DistributedSampler(dataset)
train_loader = DataLoader(dataset, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "a sampler for validation, or none": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
eval_sampler = DistributedSampler(dataset) if args.distributed else None
eval_loader = DataLoader(dataset, sampler=eval_sampler)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "not shuffled": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
sampler = DistributedSampler(dataset, shuffle=False)
train_loader = DataLoader(dataset, sampler=sampler)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "one pass over the data": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
sampler = DistributedSampler(dataset)
train_loader = DataLoader(dataset, sampler=sampler)
for x, y in train_loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
""",
    "a sampler for validation": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
val_sampler = DistributedSampler(dataset)
train_loader = DataLoader(dataset, sampler=val_sampler)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "accelerate sets it": """from accelerate import Accelerator
accelerator = Accelerator()
model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
sampler = DistributedSampler(dataset)
train_loader = DataLoader(dataset, sampler=sampler)
train_loader = accelerator.prepare(train_loader)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "one process": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    if torch.isnan(loss):
        print("skipped a batch")
        continue
    loss.backward()
    opt.step()
""",
    "all ranks agree": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    seen = loss.detach().clone()
    torch.distributed.all_reduce(seen)
    if not torch.isfinite(seen):
        print("skipped a batch")
        continue
    loss.backward()
    opt.step()
""",
    "agreed by a helper": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
from dist import reduce_mean
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    seen = reduce_mean(loss)
    if torch.isnan(seen):
        print("skipped a batch")
        continue
    loss.backward()
    opt.step()
""",
    "it ends the run": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
model = nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    if torch.isnan(loss):
        print("skipped a batch")
        raise RuntimeError('NaN')
    loss.backward()
    opt.step()
""",
    "seeded in each worker": """class Pictures(Dataset):
    def __init__(self, files):
        self.files = files
        self.rng = np.random.default_rng(0)
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return self.files[i] + self.rng.normal()
from data import seed_worker
train_loader = DataLoader(Pictures(args.files), batch_size=8, num_workers=4, worker_init_fn=seed_worker)
model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "no workers": """class Pictures(Dataset):
    def __init__(self, files):
        self.files = files
        self.rng = np.random.default_rng(0)
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return self.files[i] + self.rng.normal()
train_loader = DataLoader(Pictures(args.files), batch_size=8)
model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "the global state, which torch seeds": """class Pictures(Dataset):
    def __init__(self, files):
        self.files = files
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return self.files[i] + np.random.normal()
train_loader = DataLoader(Pictures(args.files), batch_size=8, num_workers=4)
model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for x, y in train_loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "with the optimizer": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
state = torch.load("last.pt")
model.load_state_dict(state["model"])
start = state["epoch"]
for epoch in range(start, 3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch}, "last.pt")
""",
    "weights to use, nothing to resume": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
state = torch.load("last.pt")
model.load_state_dict(state["model"])
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
""",
    "SGD has no state": """model = nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
state = torch.load("last.pt")
model.load_state_dict(state["model"])
start = state["epoch"]
for epoch in range(start, 3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
""",
    "clipped in the hook": """model = nn.Linear(2, 2)
opts = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}
def hook(p):
    nn.utils.clip_grad_norm_([p], 1.0)
    opts[p].step()
    opts[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
""",
    "a hook that only looks": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
norms = []
for p in model.parameters():
    p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
""",
    "both modes": """import schedulefree
model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
opt = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    opt.train()
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    model.eval()
    opt.eval()
    with torch.no_grad():
        for x, y in val_loader:
            print(F.mse_loss(model(x), y).item())
""",
    "an optimizer without modes": """import schedulefree
model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            print(F.mse_loss(model(x), y).item())
""",
    "with a second optimizer": """from muon import Muon
model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3)
opt = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        rest.step()
        rest.zero_grad()
""",
    "all parameters": """from muon import Muon
model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
opt = Muon(model.parameters(), lr=0.02)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
""",
    "frozen": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for p in model.parameters():
    p.requires_grad = False
""",
    "an attribute of one's own": """class Box:
    def __init__(self, require_grad):
        self.require_grad = require_grad
box = Box(True)
box.require_grad = False
""",
    "with a little added": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    loss = -(y * torch.log(F.softmax(model(x), dim=1) + 1e-8)).sum()
    loss.backward()
    opt.step()
""",
    "clamped before": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    p = torch.sigmoid(model(x)).clamp(min=args.floor)
    loss = -(y * torch.log(p)).mean()
    loss.backward()
    opt.step()
""",
    "a metric": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    with torch.no_grad():
        print(torch.log(F.softmax(model(x), dim=1)).mean().item())
""",
    "log_softmax": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    loss = -(y * F.log_softmax(model(x), dim=1)).sum()
    loss.backward()
    opt.step()
""",
    "a target from numpy": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    pred = model(x)
    soft = torch.from_numpy(np.round(pred.detach().numpy()))
    loss = F.mse_loss(pred, soft)
    loss.backward()
    opt.step()
""",
    "data from numpy": """model = nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    opt.zero_grad()
    x = torch.from_numpy(np.asarray(x))
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
""",
}


@pytest.mark.parametrize("name", FAULTY)
def test_the_fault_is_found(name: str) -> None:
    found = check_script(HEAD + FAULTY[name])
    assert [hit.code for hit in found.faults] == [name[:5]]
    assert all(hit.diff or hit.snippet for hit in found.hits)


@pytest.mark.parametrize("name", CLEAN)
def test_what_only_looks_like_it_is_silent(name: str) -> None:
    assert not check_script(HEAD + CLEAN[name]).hits


def test_each_new_rule_has_a_fault_here() -> None:
    assert {name[:5] for name in FAULTY} == {code for code in RULES if code in NEW}


NEW = {"SS111", "SS112", "SS307", "SS308", "SS605", "SS606", "SS701", "SS702", "SS703", "SS704"}
"""Rules without a frozen script: their faults are here."""
