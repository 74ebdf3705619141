"""The demo's story: one small transformer, three things that go wrong, and three ways through it."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch

from steadystep.config import Config, autopilot, observe
from steadystep.faults import Fault, flipped_bit, scaled_gradients, scaled_lr
from steadystep.guard import Guard
from steadystep.lab.gpt import GPT, GPTSize, TopicsText
from steadystep.records import Diagnosis, Outcome

SIZE = GPTSize()
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
BROKEN = "norm.weight"

Arm = Literal["no fault", "unguarded", "guarded"]
OnOutcome = Callable[[Outcome], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """When what goes wrong."""

    steps: int = 700

    @property
    def spike_at(self) -> int:
        """All gradients are multiplied by ten once."""
        return self.steps * 5 // 7

    @property
    def leap(self) -> range:
        """The learning rate is a hundred times too high."""
        start = self.steps * 4 // 5
        return range(start, start + self.steps // 35)

    @property
    def flip_at(self) -> int:
        """One bit of one weight flips."""
        return self.steps * 32 // 35

    def faults(self, model: GPT, optimizer: torch.optim.Optimizer) -> tuple[Fault, ...]:
        """The exercise, and two nastier ones."""
        return (
            scaled_gradients(model, steps={self.spike_at}, factor=10.0),
            scaled_lr(optimizer, steps=self.leap, factor=100.0),
            flipped_bit(model, steps={self.flip_at}, parameter=BROKEN),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEnd:
    """How one run ended."""

    held_out: float
    updates: int
    finite: bool
    seconds: float
    diagnoses: tuple[Diagnosis, ...]


def live(story: Story, arm: Arm, *, seed: int, run_dir: Path, watch: OnOutcome) -> StoryEnd:
    """One of the three runs. Those without a guard have one that only looks: the same bits, and a log to compare."""
    torch.manual_seed(seed)
    model = GPT(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=seed)
    faults = () if arm == "no fault" else story.faults(model, optimizer)
    config: Config = autopilot() if arm == "guarded" else observe()
    started = time.perf_counter()
    with Guard(model, optimizer, config=config, run_dir=run_dir) as guard:
        for step in range(story.steps):
            batch = text.batch()
            with ExitStack() as stack:
                for fault in faults:
                    stack.enter_context(fault.at(step))
                watch(guard.step(model.loss, batch=batch))
        with torch.no_grad():
            held_out = model.loss(text.held_out()).item()  # sync: once a run
        guard.validate(held_out)
        diagnoses = guard.diagnose()
        finite = all(bool(p.isfinite().all()) for p in model.parameters())  # sync: once a run
        return StoryEnd(
            held_out=held_out if finite else math.nan,
            updates=guard.updates,
            finite=finite,
            seconds=time.perf_counter() - started,
            diagnoses=diagnoses,
        )


def num_parameters() -> int:
    """Of the model."""
    return sum(p.numel() for p in GPT(SIZE).parameters())
