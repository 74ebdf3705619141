"""Types of the faulty programs: one training job, the program that builds it, and the plain loop that runs it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

Batch = Any  # a tuple, a dict or a single tensor, as the program's author liked it

LABELS = (
    "learning-rate-too-high",
    "learning-rate-too-low",
    "clipping-too-tight",
    "missing-zero-grad",
    "schedule-error",
    "frozen-parameters",
    "zero-gradient",
    "dead-units",
    "saturation",
    "vanishing-gradient",
    "exploding-gradient",
    "poor-initialisation",
    "unscaled-data",
    "unscaled-targets",
    "constant-targets",
    "all-ignored-targets",
    "labels-shuffled",
    "constant-inputs",
    "repeated-batch",
    "unshuffled-data",
    "wrong-loss",
    "softmax-axis",
    "output-independent-of-input",
    "batch-dependence",
    "batch-size-unfit",
    "regularisation-too-strong",
    "precision",
    "non-finite",
    "eval-mode",
    "target-leak",
    "entropy-collapse",
    "policy-drift",
    "flat-reward",
    "optimizer-state-reset",
    "wrong-optimizer-params",
    "oscillation",
    "suspicious-perfection",
)


@dataclass(frozen=True, kw_only=True)
class LoopFaults:
    """What the training loop itself does wrong; the defaults are a correct loop."""

    zero_grad_every: int = 1  # steps between two zero_grad calls; 0: never called
    zero_grad_before_step: bool = False  # also called between backward and optimizer.step
    reset_optimizer_every: int = 0  # steps after which the optimizer is created anew; 0: never


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One concrete training job, ready to run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Batch], Tensor]  # same batch, same weights: same loss, apart from dropout
    batches: Callable[[], Iterator[Batch]]  # endless; reinforcement learning rolls the current policy out on `next`
    num_steps: int
    score: Callable[[], float]  # held-out quality, higher is better
    scheduler: LRScheduler | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    loop: LoopFaults = LoopFaults()


Build = Callable[[bool, int], Setup]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program in two versions, `build(True, seed)` with the fault and `build(False, seed)` without."""

    name: str
    family: str
    faults: tuple[str, ...]  # acceptable labels, best first; empty: healthy, and `build` ignores its first argument
    story: str
    source: str
    build: Build
    same_start: bool = True  # both versions start from the same state_dict
    loss_tells: bool = True  # False: the fault changes what the loss measures, so only the score can be compared


def program(
    family: str, *faults: str, story: str, source: str = "own", same_start: bool = True, loss_tells: bool = True
) -> Callable[[Build], Program]:
    """Turn a build function into a `Program` named after its family and itself."""

    def wrap(build: Build) -> Program:
        if unknown := set(faults) - set(LABELS):
            raise ValueError(f"{build.__name__}: unknown labels {sorted(unknown)}")
        return Program(
            name=f"{family}-{build.__name__.replace('_', '-')}",
            family=family,
            faults=faults,
            story=story,
            source=source,
            build=build,
            same_start=same_start,
            loss_tells=loss_tells,
        )

    return wrap


def train(setup: Setup, num_steps: int | None = None) -> list[float]:
    """Run the plain loop and return the loss of every step."""
    losses: list[float] = []
    batches = setup.batches()
    max_norm = setup.config.get("training", {}).get("max_grad_norm")
    setup.optimizer.zero_grad()
    for step in range(1, (num_steps or setup.num_steps) + 1):
        loss = setup.loss(next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if max_norm is not None:
            nn.utils.clip_grad_norm_(setup.model.parameters(), max_norm)
        update(setup, step)
    return losses


def update(setup: Setup, step: int) -> None:
    """Apply the gradients of step number `step` (from 1), with the loop faults of the program."""
    loop = setup.loop
    if loop.zero_grad_before_step:
        setup.optimizer.zero_grad()
    setup.optimizer.step()
    if setup.scheduler is not None:
        setup.scheduler.step()
    if loop.reset_optimizer_every and step % loop.reset_optimizer_every == 0:
        setup.optimizer.state.clear()  # what `optimizer = Adam(model.parameters())` inside the loop amounts to
    if loop.zero_grad_every and step % loop.zero_grad_every == 0:
        setup.optimizer.zero_grad()
