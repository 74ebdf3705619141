"""The same program twice: as its author wrote it, and guarded.

A program is a function of a seed and a `Drive`. It makes its model and optimizer, asks the drive for the update, says
with `drive.ends` how it is to be judged, and loops. The drive decides what an update is: plain torch, `Guard.step`, or
the plain lines under `steadystep.watch`.
"""

import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import steadystep
from steadystep.config import Config
from steadystep.records import Outcome
from tests.seen.schedules import BY_HAND

Way = Literal["plain", "observe", "guard", "batch", "watch"]
"""`guard` gives closures to `Guard.step`, `batch` closures and batches; `observe` is `guard` that only looks."""

Update = Callable[..., float]
Clipping = float | None


@dataclass(frozen=True, kw_only=True)
class Twins:
    """How a guarded run compares with its plain twin."""

    seed: int
    bit_identical: bool
    warnings: tuple[str, ...]
    """Findings of severity warn or above."""
    acts: tuple[str, ...]
    """Plans other than "go ahead"."""
    halted: str
    """What `TrainingHalted` said, or nothing."""
    held_out_plain: float
    held_out_guarded: float
    diagnosed: str
    """The likeliest cause, of each guard."""
    outcomes: tuple[Outcome, ...] = field(repr=False)

    @property
    def untouched(self) -> bool:
        """The first half of promise 11: a healthy run is neither changed nor warned of."""
        return self.bit_identical and not self.warnings and not self.acts and not self.halted and self.healthy

    @property
    def healthy(self) -> bool:
        """Every guard diagnosed nothing."""
        return set(self.diagnosed.split(", ")) == {"healthy"}

    def no_worse(self, by: float = 0.05) -> bool:
        """The second half of promise 11: the run was not halted and did not end worse than its twin by more."""
        return not self.halted and self.held_out_guarded <= self.held_out_plain * (1.0 + by)

    def __str__(self) -> str:
        acts, said = self.acts[:6], self.warnings[:4]
        return (
            f"seed {self.seed}: {'same bits' if self.bit_identical else 'CHANGED'}, {self.diagnosed}, "
            f"held-out {self.held_out_plain:.5g} plain, {self.held_out_guarded:.5g} guarded; "
            f"{len(self.acts)} acts {acts}; {len(self.warnings)} warnings {said}; {self.halted}"
        )


@dataclass
class Drive:
    """Makes updates one way, and writes down what the guard said about them."""

    way: Way
    config: Mapping[str, Any] = field(default_factory=dict)
    by_hand: str = ""
    """The schedule of `schedules.BY_HAND` that the loop writes into `group["lr"]` before each update."""
    outcomes: list[Outcome] = field(default_factory=list)
    guards: list[steadystep.Guard] = field(default_factory=list)
    modules: tuple[nn.Module, ...] = ()
    held_out: Callable[[], float] = lambda: math.nan
    removals: list[Callable[[], None]] = field(default_factory=list)

    def ends(self, held_out: Callable[[], float], *modules: nn.Module) -> None:
        """What is looked at when the program is over, however it ended."""
        self.held_out, self.modules = held_out, modules

    def over(self, model: nn.Module, optimizer: Optimizer, *, clip: Clipping = None) -> Update:
        """The update of this model: called with a closure, and the batch that it takes if there is one."""
        make = self._plain if self.way in ("plain", "watch") else self._guarded
        update, base = make(model, optimizer, clip), [group["lr"] for group in optimizer.param_groups]
        if not self.by_hand:
            return update
        schedule, steps = BY_HAND[self.by_hand], itertools.count()

        def placed(closure: Callable[..., Tensor], batch: Any = None) -> float:
            mult = schedule(next(steps))
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * mult
            return update(closure, batch)

        return placed

    def _guarded(self, model: nn.Module, optimizer: Optimizer, clip: Clipping) -> Update:
        training = {**self.config.get("training", {}), **({} if clip is None else {"max_grad_norm": clip})}
        mode = {"mode": "observe"} if self.way == "observe" else {}
        guard = steadystep.Guard(model, optimizer, config={**self.config, **mode, "training": training})
        self.guards.append(guard)
        self.removals.append(guard.close)

        def update(closure: Callable[..., Tensor], batch: Any = None) -> float:
            if batch is None:
                outcome = guard.step(closure)
            elif self.way == "batch":
                outcome = guard.step(closure, batch=batch)
            else:
                outcome = guard.step(lambda: closure(batch))
            self.outcomes.append(outcome)
            return outcome.loss

        return update

    def _plain(self, model: nn.Module, optimizer: Optimizer, clip: Clipping) -> Update:
        watcher = None
        if self.way == "watch":
            watcher = steadystep.watch(model, optimizer, config=dict(self.config))
            self.guards.append(watcher.guard)
            self.removals.append(watcher.remove)
        scheduled = None if self.way == "watch" else self._scheduled(optimizer)
        made = 0

        def update(closure: Callable[..., Tensor], batch: Any = None) -> float:
            nonlocal made
            optimizer.zero_grad()
            if scheduled is not None:
                scheduled(made)
            loss = closure() if batch is None else closure(batch)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            made += 1
            if watcher is not None and watcher.outcome is not None:
                self.outcomes.append(watcher.outcome)
            return loss.item()

        return update

    def _scheduled(self, optimizer: Optimizer) -> Callable[[int], None] | None:
        """The schedule that the guard's settings ask for, as the plain loop would have it."""
        base = [group["lr"] for group in optimizer.param_groups]
        schedule = Config.load(dict(self.config)).training.schedule(base_lr=max(base))
        if schedule is None:
            return None

        def place(step: int) -> None:
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * schedule(step)

        return place

    def close(self) -> None:
        for remove in self.removals:
            remove()


Program = Callable[[int, Drive], None]


@dataclass(frozen=True)
class Ended:
    """One run, when it was over."""

    weights: tuple[Tensor, ...]
    held_out: float
    halted: str
    outcomes: tuple[Outcome, ...]
    diagnosed: str


def run(program: Program, seed: int, drive: Drive) -> Ended:
    """Run a program to its end, or to where the guard ended it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    halted = ""
    try:
        program(seed, drive)
    except steadystep.TrainingHalted as error:
        halted = f"HALTED at step {error.step}: {error.what}; {error.did}"
    causes = ", ".join(guard.diagnose()[0].cause for guard in drive.guards)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a guard that was halted may say that a group was open
        drive.close()
    weights = tuple(v.detach().clone() for module in drive.modules for v in module.state_dict().values())
    with torch.no_grad():
        held_out = drive.held_out()
    return Ended(weights, held_out, halted, tuple(drive.outcomes), causes)


@functools.lru_cache(maxsize=64)
def _plain(program: Program, seed: int, config: str, by_hand: str) -> Ended:
    return run(program, seed, Drive("plain", json.loads(config), by_hand))


def plain(program: Program, seed: int, config: Mapping[str, Any] | None = None, by_hand: str = "") -> Ended:
    """The twin without a guard; computed once per process."""
    return _plain(program, seed, json.dumps(dict(config or {})), by_hand)


def compare(
    program: Program,
    seeds: Sequence[int],
    way: Way = "guard",
    *,
    config: Mapping[str, Any] | None = None,
    by_hand: str = "",
) -> tuple[Twins, ...]:
    """Run plain and guarded twins of a program, one pair for each seed."""
    pairs = []
    for seed in seeds:
        guarded = run(program, seed, Drive(way, dict(config or {}), by_hand))
        pairs.append(_twins(seed, plain(program, seed, config, by_hand), guarded))
    return tuple(pairs)


def _twins(seed: int, alone: Ended, guarded: Ended) -> Twins:
    found = [f for o in guarded.outcomes for f in o.findings if f.severity != "info"]
    acted = [o for o in guarded.outcomes if not o.plan.proceeds]
    return Twins(
        seed=seed,
        bit_identical=all(torch.equal(a, b) for a, b in zip(alone.weights, guarded.weights, strict=True)),
        warnings=tuple(f"{f.step} {f.detector} ({f.severity}): {f.what}" for f in found),
        acts=tuple(f"{o.step} {'+'.join(o.plan.actions)} to {o.plan.to} for {o.plan.reason}" for o in acted),
        halted=guarded.halted,
        held_out_plain=alone.held_out,
        held_out_guarded=guarded.held_out,
        diagnosed=guarded.diagnosed,
        outcomes=guarded.outcomes,
    )


def lost_updates(outcomes: Sequence[Outcome]) -> list[int]:
    """How many updates each rollback threw away."""
    lost, updates = [], 0
    for outcome in outcomes:
        if outcome.restored is not None:
            lost.append(updates - outcome.restored)
            updates = outcome.restored
        else:
            updates += outcome.stepped
    return lost


def assert_untouched(pairs: Sequence[Twins]) -> None:
    """Promise 11 for healthy runs; says which seeds were harmed, and how."""
    harmed = [str(pair) for pair in pairs if not pair.untouched]
    assert not harmed, f"{len(harmed)} of {len(pairs)} runs:\n" + "\n".join(harmed)


def assert_no_worse(pairs: Sequence[Twins], by: float = 0.05) -> None:
    """Promise 11 for runs with a fault in them."""
    harmed = [str(pair) for pair in pairs if not pair.no_worse(by)]
    assert not harmed, f"{len(harmed)} of {len(pairs)} runs:\n" + "\n".join(harmed)
