"""A small classifier that something happens to: weights that become NaN, gradients or learning rates that leap."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

import steadystep
from steadystep import faults
from steadystep.records import Outcome
from tests.seen.tasks import blobs, generators, mlp

Rates = Callable[[int], float]


def train(
    steps: int,
    *,
    fault: Sequence[Mapping[str, Any]] = (),
    optimizer: str = "Adam",
    lr: float = 3e-3,
    rates: Rates | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Ten clusters, 16-32-10, batches of 32, closures without batch=, so that nothing can be replayed."""
    torch.manual_seed(seed)
    rng, _ = generators(seed)
    model = mlp(16, 32, 10)
    kind = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[optimizer]
    made = kind(model.parameters(), lr=lr)
    broken = faults.parse(list(fault), model=model, optimizer=made) if fault else None
    outcomes = []
    with steadystep.Guard(model, made, config=config) as guard:
        for step in range(steps):
            x, y = blobs(32, rng)
            if rates is not None:
                made.param_groups[0]["lr"] = rates(step)
            with broken.at(step) if broken is not None else contextlib.nullcontext():
                outcomes.append(guard.step(lambda x=x, y=y: functional.cross_entropy(model(x), y)))
    return outcomes


def nan_weights(*steps: int) -> list[dict[str, Any]]:
    return [{"kind": "bad-weight", "at": step, "parameter": "2.weight"} for step in steps]
