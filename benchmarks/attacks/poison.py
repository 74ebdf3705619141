"""One poisoned value in a good run: does it end finite, with finite checkpoints, and no worse than without a guard?

Networks of five kinds train for 120 steps. Before one of them, drawn from the seed, a value (NaN, +/-infinity or
+/-1e38) is put into the input, the loss, a gradient, a weight, a moment or a buffer. The same is done to the run
without a guard. A case passes when the guarded run goes on to the end, leaves nothing behind that is not finite
(weights, moments, buffers, checkpoints), and its loss on held-out batches in evaluation mode is no worse than that of
the other run, by 5 % or by 0.02 (the targets have a variance of 0.6).

    python benchmarks/attacks/poison.py --seed 1 --out build/attacks/poison.jsonl
"""

import argparse
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import torch
from networks import NETWORKS, OPTIMIZERS, Task, not_finite, tensors_of
from table import Rows, arguments
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import steadystep
from steadystep._utils.text import quiet_log
from steadystep.checkpoints.checkpoint import read_checkpoint
from steadystep.errors import SteadystepError

_STEPS = 120
_VALUES = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "1e38": 1e38, "-1e38": -1e38}
_PLACES = ("input", "loss", "gradient", "weight", "moment", "buffer")


@dataclass(frozen=True)
class Case:
    """What is put where, and into which run."""

    place: str
    value: str
    network: str
    optimizer: str
    precision: str
    at: int
    seed: int

    def __str__(self) -> str:
        return f"{self.value}, {self.network}, {self.optimizer}, {self.precision}, step {self.at}, seed {self.seed}"


class Run:
    """One network on its way, which can be poisoned."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.seed)
        self.case, self.task, self.step = case, Task(case.seed), 0
        self.model = NETWORKS[case.network]()
        self.optimizer = OPTIMIZERS[case.optimizer](self.model.parameters())
        self._rng = random.Random(f"{case}{case.place}")
        target = self._rng.choice(list(self.model.parameters()))
        target.register_hook(self._poisoned_gradient)  # type: ignore[no-untyped-call]

    @property
    def _is_now(self) -> bool:
        return self.step == self.case.at

    def _poisoned_gradient(self, gradient: Tensor) -> Tensor:
        if self._is_now and self.case.place == "gradient":
            gradient = gradient.clone()
            gradient.view(-1)[0] = _VALUES[self.case.value]
        return gradient

    def before(self) -> None:
        """Between two steps."""
        if not self._is_now or self.case.place not in ("weight", "moment", "buffer"):
            return
        if self.case.place == "weight":
            tensors: list[Tensor] = [p.data for p in self.model.parameters()]
        elif self.case.place == "moment":
            held = [v for slots in self.optimizer.state.values() for v in slots.values()]
            tensors = [v for v in held if isinstance(v, Tensor) and v.numel() > 1]
        else:
            named = [b for name, b in self.model.named_buffers() if name != "mask"]
            tensors = [b for b in named if b.is_floating_point()]
        chosen = self._rng.choice(tensors)
        chosen.view(-1)[self._rng.randrange(chosen.numel())] = _VALUES[self.case.value]

    def loss(self, step: int) -> Tensor:
        """Of one step, the present one or an earlier one that is run again."""
        self.step = step
        x, y = self.task.batch(step)
        if self._is_now and self.case.place == "input":
            x.view(-1)[0] = _VALUES[self.case.value]
        loss = F.mse_loss(self.model(x).float(), y)
        return loss * _VALUES[self.case.value] if self._is_now and self.case.place == "loss" else loss


def without(case: Case) -> float:
    """The held-out loss of the run without a guard."""
    run = Run(case)
    for run.step in range(_STEPS):
        run.before()
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.precision == "bf16"):
            loss = run.loss(run.step)
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
    return run.task.held_out(run.model)


def guarded(case: Case, folder: Path) -> tuple[str, float]:
    """What is wrong with the end of the guarded run, and its held-out loss."""
    run = Run(case)
    config = {
        "training": {"mixed_precision": case.precision},
        "monitoring": {"save_checkpoints": True, "checkpoint_frequency": 20, "sinks": []},
        "recovery": {"incident_bundles": False},
    }
    guard = steadystep.Guard(run.model, run.optimizer, run_dir=folder, config=config)
    try:
        with guard:
            for step in range(_STEPS):
                run.step = step
                run.before()
                guard.step(run.loss, batch=step)
    except SteadystepError as error:
        return f"{type(error).__name__}: {error}", math.nan
    bad = not_finite(tensors_of(run.model, run.optimizer))
    for path in sorted((folder / "checkpoints").glob("step-*")):
        bad += [f"{path.name}: {name}" for name in read_checkpoint(path).not_finite]
    return (f"not finite: {', '.join(bad[:4])}" if bad else ""), run.task.held_out(run.model)


def attack(case: Case) -> tuple[str, float, float]:
    """What is wrong with it (nothing: ""), and the held-out losses of both runs."""
    plain = without(case)
    with tempfile.TemporaryDirectory() as folder:
        wrong, kept = guarded(case, Path(folder))
    if not wrong and not math.isfinite(kept):
        wrong = f"the held-out loss is {kept}"
    if not wrong and math.isfinite(plain) and kept > plain + max(0.05 * plain, 0.02):
        wrong = f"worse: {kept:.4f}, {plain:.4f} without a guard"
    return wrong, kept, plain


def cases(seed: int, count: int) -> Iterator[Case]:
    """Every place with every value, each in turn with another network, optimizer and precision."""
    rng = random.Random(seed)
    settings = list(product(NETWORKS, OPTIMIZERS, ("fp32", "bf16")))
    rng.shuffle(settings)
    others = cycle(settings)
    for number, (place, value) in enumerate(cycle(product(_PLACES, _VALUES))):
        if number == count:
            return
        network, optimizer, precision = next(others)
        at = rng.randrange(2, 100)
        yield Case(place, value, network, optimizer, precision, at, seed=rng.randrange(1000))


def main() -> int:
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--count", type=int, default=260, help="cases (default 260)")
    options = arguments(__doc__, more=more)
    torch.set_num_threads(1)
    with Rows(options.out) as rows, warnings.catch_warnings(), quiet_log():
        warnings.simplefilter("ignore")
        for case in cases(options.seed, options.count):
            wrong, kept, plain = attack(case)
            rows.add(
                f"{case.place}: NaN, infinity, 1e38", str(case), passed=not wrong, said=wrong, kept=kept, plain=plain
            )
        return rows.finish()


if __name__ == "__main__":
    sys.exit(main())
