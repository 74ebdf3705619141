"""Nine faults as declarations for `steadystep.faults`, the same for the guarded run and its plain twin."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from steadystep import faults
from tests.field.tasks import Task

FAULTS: dict[str, dict[str, Any]] = {
    "nan-gradient": {"kind": "bad-gradient"},
    "gradients-1e4-once": {"kind": "grad-scale", "factor": 1e4},
    "gradients-1000-for-15": {"kind": "grad-scale", "factor": 1e3, "for": 15},
    "lr-100-for-20": {"kind": "lr-scale", "factor": 100.0, "for": 20},
    "nan-weight": {"kind": "bad-weight"},
    "flipped-bit": {"kind": "bit-flip"},
    "nan-batches-5": {"kind": "bad-input"},
    "garbage-10": {"kind": "shuffled-labels", "for": 10},
    "zeroed-layer": {"kind": "zeroed-layer"},
}


def first_step(seed: int, num_steps: int) -> int:
    """Where a fault begins: between 30 % and 60 % of the run."""
    share = 0.3 + 0.3 * ((seed * 7919) % 101) / 100
    return int(share * num_steps)


def made(name: str | None, task: Task, model: nn.Module, optimizer: Optimizer, *, seed: int, at: int) -> faults.Fault:
    """The fault on one model of a task."""
    if name is None:
        return faults.NO_FAULT
    entry = FAULTS[name] | {"at": at}
    if name == "nan-batches-5":
        entry["at"] = [at + 7 * i for i in range(5)]
        if not task.real_inputs:
            entry["kind"] = "bad-loss"
    if name == "garbage-10" and task.labels is None:
        entry |= {"kind": "data-scale", "factor": -20.0}
    return faults.parse(entry, model=model, optimizer=optimizer, seed=seed)
