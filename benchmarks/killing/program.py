"""The program that is killed: started again in the same folder, it is the same program."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import steadystep
from killing.moments import Moments
from killing.variants import Variant
from steadystep._utils.rng import all_random_state

ROWS, BATCH, WIDTH = 44, 4, 32


@final
class Net(nn.Module):
    """Everything that remembers: running statistics, dropout, a buffer that no state_dict has."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2))
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.calls: Tensor
        self._moments = moments

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        self.calls += 1
        middle: Tensor = self.first(x)
        if middle.requires_grad:
            self._moments.reach("forward")
            middle.register_hook(lambda _: self._moments.reach("backward"))  # type: ignore[no-untyped-call]
        output: Tensor = self.last(middle).squeeze(-1)
        return (output - x.sum(1)).square().mean()


@final
class Noisy(Dataset[Tensor]):
    """Draws from all three generators."""

    def __init__(self, rows: Tensor, moments: Moments) -> None:
        self._rows = rows
        self._moments = moments

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        self._moments.reach("a batch")
        return self._rows[index] + 0.01 * random.random() + 0.01 * float(np.random.rand()) + 0.01 * torch.rand(1)


@final
class Stream(IterableDataset[Tensor]):
    """Has no length and no order but that of its random numbers."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(ROWS):
            self._moments.reach("a batch")
            yield torch.randn(8)


@final
class Average:
    """EMA weights, and the losses so far."""

    def __init__(self, model: nn.Module, twin: nn.Module, moments: Moments) -> None:
        self._model = model
        self._moments = moments
        twin.load_state_dict(model.state_dict())
        self.values = [p.detach() for p in twin.parameters()]
        self.losses: list[float] = []

    def update(self, loss: float) -> None:
        """After a step."""
        self.losses.append(loss)
        for number, (value, p) in enumerate(zip(self.values, self._model.parameters(), strict=True)):
            value.lerp_(p.detach(), 0.1)
            if number == 1:
                self._moments.reach("the average")

    def state_dict(self) -> dict[str, Any]:
        """For `guard.keep`."""
        return {"values": self.values, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.losses = list(state["losses"])
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


def train(variant: Variant, folder: Path | None, moments: Moments) -> dict[str, Any]:
    """To the end, from wherever it was; what there is to compare, and where it began."""
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(variant.seed)
    rows = torch.randn(ROWS, 8)
    model = Net(moments)
    settings = {"momentum": 0.9} if variant.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, variant.optimizer)(model.parameters(), lr=0.01, **settings)
    optimizer.register_step_post_hook(lambda *_: moments.reach("the update"))
    if folder is None:
        guard = steadystep.Guard(model, optimizer, config=variant.config())
    else:
        guard = steadystep.Guard.resume(model, optimizer, run_dir=folder, config=variant.config())
    began, numbers = guard.attempts, all_random_state(torch.device("cpu"))
    average = Average(model, Net(moments), moments)  # draws random numbers after they were restored
    guard.keep("average", average)
    loader = loader_of(variant, rows, moments)
    for _ in range(guard.epoch, variant.epochs):
        for batch in guard.batches(loader):
            average.update(guard.step(model, batch=batch).loss)
        if variant.validates:
            guard.validate(val_loss=validation(model, rows, moments))
        numbers = all_random_state(torch.device("cpu"))
    parts = compared(model, optimizer, guard, average) | {"random": digest(numbers)}
    guard.close()
    return {"began": began, "steps": guard.attempts, "parts": parts}


def loader_of(variant: Variant, rows: Tensor, moments: Moments) -> DataLoader[Any]:
    if variant.loader == "stream":
        return DataLoader(Stream(moments), batch_size=BATCH)
    data = Noisy(rows, moments)
    generator = torch.Generator().manual_seed(3) if variant.loader == "own generator" else None
    return DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator)


@torch.no_grad()
def validation(model: nn.Module, rows: Tensor, moments: Moments) -> float:
    model.eval()
    loss = float(model(rows + 0.01 * torch.randn(1)))  # random numbers here count too
    moments.reach("a validation")
    model.train()
    return loss


def compared(model: Net, optimizer: torch.optim.Optimizer, guard: steadystep.Guard, average: Average) -> dict[str, str]:
    """A digest of each thing that must be the same to the last bit."""
    # a look at the first few batches that was cut short begins again: evidence for a person, no part of a decision
    memory = {name: part for name, part in guard.state_dict().items() if name not in ("run history", "inputs")}
    things = {
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "optimizer": optimizer.state_dict(),
        "average": average.values,
        "losses": [loss.hex() for loss in average.losses],
        "updates": [guard.updates, guard.attempts, guard.epoch],
        "guard": json.dumps(memory, sort_keys=True),
    }
    return {name: digest(thing) for name, thing in things.items()}


def digest(thing: Any) -> str:
    found = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, Tensor):
            take([str(value.dtype), list(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()])
        elif isinstance(value, np.ndarray):
            take([str(value.dtype), value.tobytes()])
        elif isinstance(value, dict):
            take([[repr(key), value[key]] for key in value])
        elif isinstance(value, list | tuple):
            found.update(b"[")
            for item in value:
                take(item)
            found.update(b"]")
        else:
            found.update(f"{value!r},".encode())

    take(thing)
    return found.hexdigest()
