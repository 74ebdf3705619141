"""Matrix products that come out wrong: how many harmful ones are seen before they cost 1 % of the loss.

    python benchmarks/wrong_matmuls.py                 100 trials of each kind
    python benchmarks/wrong_matmuls.py --store FILE    what is in FILE is not run again: a line of JSON for each trial

From a random step between 90 and 119 on, of 180, a random bit of a random element of the output of a random matrix
product flips: once, in one of ten forward passes, or in every one, each time another one, also when a step is computed
again. A trial is harmful if, without a guard, the loss on 512 held-out samples is 1 % above that of the run without the
fault at three steps in a row. Harmful ones are run again with a guard, with every 20th step computed twice and those
that stand out: seen in time if it reports anything before that loss is 1 % above. The model is evaluated without the
fault. The guard trusts these short runs to be repeatable after two checks instead of 16.
"""

import argparse
import logging
import random
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bit_flips import network, optimizers, stored
from steadystep import Guard
from steadystep.engine import miscomputation
from steadystep.errors import TrainingHalted

STEPS, AT, LATEST, MORE = 180, 90, 119, 1.01
RATES = {"once": 0.0, "one pass in ten": 0.1, "every pass": 1.0}
EVERY = 20


class BrokenUnit:
    """Flips bits of matrix products, by random numbers of its own."""

    def __init__(self, model: nn.Module, seed: int, rate: float) -> None:
        self._chance, self._rate, self._left = random.Random(seed), rate, 1
        self._layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._which = -1
        self.active = False
        for number, layer in enumerate(self._layers):
            layer.register_forward_hook(partial(self._passed, number))

    def _passed(self, number: int, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if not self.active:
            return
        if number == 0:
            hit = self._chance.random() < self._rate if self._rate else self._left > 0
            self._which = self._chance.randrange(len(self._layers)) if hit else -1
            self._left -= hit
        if number == self._which:
            flat = output.data.view(-1).view(torch.int32)
            bit = self._chance.randrange(32)
            flat[self._chance.randrange(len(flat))] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)


Step = Callable[[Callable[[], Tensor]], tuple[bool, bool]]
"""Makes one update; returns whether anything was reported, and whether the run has ended."""


def plain(kind: str, model: nn.Module) -> Step:
    """The loop without a guard."""
    each = optimizers(kind, model)

    def step(closure: Callable[[], Tensor]) -> tuple[bool, bool]:
        for optimizer in each:
            optimizer.zero_grad()
        closure().backward()  # type: ignore[no-untyped-call]
        for optimizer in each:
            optimizer.step()
        return False, False

    return step


def guarded(kind: str, model: nn.Module, every: int) -> Step:
    """With every `every`-th step computed twice, and those that stand out."""
    guard = Guard(model, optimizers(kind, model), config={"monitoring": {"recompute_every": every}})

    def step(closure: Callable[[], Tensor]) -> tuple[bool, bool]:
        try:
            return any(found.severity != "info" for found in guard.step(closure).findings), False
        except TrainingHalted:  # what it said counts
            return True, True

    return step


def loss_on(model: nn.Module, x: Tensor) -> Tensor:
    """Of telling whether the sum of a row is above zero."""
    return nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())


def run(seed: int, rate: float | None, every: int = 0) -> tuple[list[float], int | None]:
    """The held-out loss after each step from `AT` on, and the first step with a finding; without a rate no fault."""
    model, kind = network(seed % 7), ("AdamW", "SGD", "Muon")[seed % 3]
    unit = BrokenUnit(model, seed, rate or 0.0)
    update = guarded(kind, model, every) if every else plain(kind, model)
    data = torch.Generator().manual_seed(seed % 7)
    held = torch.randn(512, 10, generator=data)
    losses: list[float] = []
    seen = None
    start = random.Random(f"start {seed}").randint(AT, LATEST)
    for step in range(STEPS):
        x = torch.randn(16, 10, generator=data)
        unit.active = rate is not None and step >= start
        loud, ended = update(partial(loss_on, model, x))
        unit.active = False
        if loud and seen is None and step >= start:
            seen = step
        if step < AT:
            continue
        model.eval()
        with torch.no_grad():
            losses.append(float(loss_on(model, held)))
        model.train()
        if ended:
            losses += [losses[-1]] * (STEPS - AT - len(losses))
            break
    return losses, seen


def above(losses: list[float], clean: list[float], in_a_row: int) -> int | None:
    """The first of so many steps in a row at which the loss is 1 % above."""
    over = [not loss <= MORE * usual for loss, usual in zip(losses, clean, strict=True)]
    return next((AT + i for i in range(len(over)) if all(over[i : i + in_a_row])), None)


def trial(seed: int, rate: float) -> dict[str, Any]:
    """Without a guard, and with one where that did harm."""
    clean = usual(seed % 21)
    if above(run(seed, rate)[0], clean, 3) is None:
        return {"harmful": False, "in_time": False}
    losses, seen = run(seed, rate, EVERY)
    cost = above(losses, clean, 1)
    return {"harmful": True, "seen": seen, "in_time": seen is not None and (cost is None or seen <= cost), "cost": cost}


@lru_cache
def usual(seed: int) -> list[float]:
    """Without the fault; of 21 seeds, because data, model and optimizer repeat after as many."""
    return run(seed, None)[0]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each kind")
    parser.add_argument("--first", type=int, default=1000, metavar="SEED", help="seed of the first")
    parser.add_argument("--store", type=Path, help="file of finished trials")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    miscomputation._TRUSTED = 2
    every: dict[str, list[dict[str, Any]]] = {name: [] for name in RATES}
    for seed in range(args.first, args.first + args.trials):
        for name, rate in RATES.items():
            every[name].append(stored(args.store, f"{name} {seed}", partial(trial, seed, rate)))
    print(f"{'wrong products':16} {'trials':>6} {'harmful':>7} {'seen in time':>12}")
    for name, told in every.items():
        harmful = [one for one in told if one["harmful"]]
        print(f"{name:16} {len(told):6} {len(harmful):7} {sum(one['in_time'] for one in harmful):12}", flush=True)


if __name__ == "__main__":
    main()
