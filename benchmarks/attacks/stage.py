"""The run that bad calls are made in: small, with BatchNorm and dropout, so that whatever leaves a trace shows."""

import copy
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import steadystep

STEPS = 14


class Average:
    """Averaged weights, as many loops keep them; saved and loaded through the guard."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for mean, now in zip(self.model.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state)


class Stage:
    """Everything a bad call can get hold of. `guard` is there once the run has begun."""

    guard: Any
    """A Guard. Not said to be one: what is done to it here, no type checker would allow."""

    def __init__(self, seed: int, folder: Path, *, accumulate: int = 1, watched: bool = False) -> None:
        torch.manual_seed(seed)
        self.folder, self.accumulate, self.watched = folder, accumulate, watched
        self.model = nn.Sequential(
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(12, 12),
            nn.Tanh(),
            nn.Linear(12, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        data = torch.Generator().manual_seed(seed + 1)
        xs = torch.randn(STEPS * accumulate, 16, 6, generator=data)
        self.batches = [(x, x.sin().sum(1, keepdim=True)) for x in xs]
        self.average = Average(self.model)
        self.at = 0
        """The micro-batch that comes next."""
        self.losses: list[float] = []
        self.watcher: Any = None
        self.begun = False

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """The one that comes next."""
        return self.batches[min(self.at, len(self.batches) - 1)]

    def loss(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """As the closure computes it."""
        x, y = self.batch if batch is None else batch
        return nn.functional.mse_loss(self.model(x), y)

    def begin(self, **more: Any) -> None:
        """Make the guard, as it should be made."""
        settings = {"training": {"gradient_accumulation_steps": self.accumulate}}
        if self.watched:
            self.watcher = steadystep.watch(self.model, self.optimizer, **more)
            self.guard = self.watcher.guard
        else:
            self.guard = steadystep.Guard(self.model, self.optimizer, config=settings, **more)
        self.begun = True
        self.guard.keep("average", self.average)

    def step(self) -> None:
        """One right step."""
        if self.watched:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.losses.append(loss.item())
        else:
            self.losses.append(float(self.guard.step(self.loss, batch=self.batch).loss))
        self.average.update(self.model)
        self.at += 1

    def end(self) -> None:
        """Let go of the model."""
        if self.watcher is not None:
            self.watcher.remove()
        self.guard.close()

    @property
    def over(self) -> bool:
        """Every batch was used."""
        return self.at == len(self.batches)

    def digest(self) -> str:
        """Weights, buffers, moments, averages, losses, the guard's memory and random numbers, to the bit."""
        file = io.BytesIO()
        torch.save(
            [
                self.model.state_dict(),
                self.optimizer.state_dict(),
                self.average.state_dict(),
                self.losses,
                json.dumps(self.guard.state_dict()),
                torch.get_rng_state(),
            ],
            file,
        )
        return hashlib.sha256(file.getvalue()).hexdigest()
