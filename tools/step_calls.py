"""What one healthy `Guard.step` costs in calls, files and kernels, on an MLP of four layers.

    python tools/step_calls.py            files of the package in the order in which a step enters them, with calls
    python tools/step_calls.py --kernels  kernel launches against a plain loop with clip_grad_norm_ and .item()

A call is a `call` event of `sys.setprofile` in a file of the package: functions, properties, comprehensions and
generators. The step that is shown is the median one of a hundred: no look at the weights and no snapshot is due at it.

Operators are all that a dispatch mode sees. Launches are those that compute or copy (views and fresh memory launch
nothing) plus reads by `.tolist()`, which a CPU does without an operator. Both loops clip at 1.0, and the guard makes no
other checks than it does by default. Whole stretches are compared, with what is due only now and then.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import steadystep

PACKAGE = Path(steadystep.__file__).parent
WARM_UP, COUNTED, KERNEL_STEPS = 300, 100, 400
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "SGD": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9),
}
_FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "is_pinned")


def network() -> nn.Module:
    torch.manual_seed(0)
    widths = (16, 64, 64, 64, 1)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths[:-1])]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


class Loop:
    """One step after the other on fresh batches, guarded or plain."""

    def __init__(self, optimizer: str) -> None:
        self.model = network()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.rng = torch.Generator().manual_seed(1)

    def compute(self) -> Tensor:
        """The loss of a fresh batch."""
        x = torch.randn(32, 16, generator=self.rng)
        loss: Tensor = (self.model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        return loss

    def plain(self) -> Callable[[], object]:
        """The loop that most people have."""
        parameters = list(self.model.parameters())

        def step() -> float:
            self.optimizer.zero_grad()
            loss = self.compute()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            self.optimizer.step()
            return loss.item()

        return step

    def guarded(self) -> Callable[[], object]:
        """The same with a guard."""
        guard = steadystep.Guard(self.model, self.optimizer, config={"training": {"max_grad_norm": 1.0}})
        return lambda: guard.step(self.compute).loss


def calls_of(step: Callable[[], object]) -> dict[str, int]:
    """Calls by file of the package, in the order of the first one."""
    found: Counter[str] = Counter()
    root = f"{PACKAGE}/"

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found[frame.f_code.co_filename.removeprefix(root)] += 1

    sys.setprofile(on_event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return dict(found)


def calls() -> dict[str, Any]:
    """The median step of a hundred, and the mean and the largest of all."""
    step = Loop("AdamW").guarded()
    for _ in range(WARM_UP):
        step()
    steps = [calls_of(step) for _ in range(COUNTED)]
    totals = [sum(found.values()) for found in steps]
    median = sorted(steps, key=lambda found: sum(found.values()))[COUNTED // 2]
    return {
        "files": len(median),
        "calls": sum(median.values()),
        "mean_calls": sum(totals) / COUNTED,
        "max_calls": max(totals),
        "max_files": max(map(len, steps)),
        "by_file": median,
    }


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by name, and reads that are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":  # torch's profiler has operators too
            self.seen[str(func)] += 1
            if not func.is_view and func.overloadpacket.__name__ not in _FRESH:
                self.launched[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_of(step: Callable[[], object]) -> Operators:
    """Of a stretch of healthy steps, after some to warm up."""
    for _ in range(WARM_UP):
        step()
    counted, tolist = Operators(), Tensor.tolist

    def read(tensor: Tensor) -> Any:
        counted.launched["tolist"] += 1
        return tolist(tensor)

    with counted, patch.object(Tensor, "tolist", read):
        for _ in range(KERNEL_STEPS):
            step()
    return counted


def kernels() -> dict[str, Any]:
    """Operators and launches per step, and which launches make the difference."""
    found = {}
    for name in OPTIMIZERS:
        plain, guarded = operators_of(Loop(name).plain()), operators_of(Loop(name).guarded())
        both = sorted({*plain.launched, *guarded.launched})
        apart = {op: (guarded.launched[op] - plain.launched[op]) / KERNEL_STEPS for op in both}
        found[name] = {
            "operators": _compared(plain.seen, guarded.seen),
            "launches": _compared(plain.launched, guarded.launched),
            "more_launches": {op: more for op, more in apart.items() if more},
        }
    return found


def _compared(plain: Counter[str], guarded: Counter[str]) -> dict[str, float]:
    return {
        "plain": plain.total() / KERNEL_STEPS,
        "guarded": guarded.total() / KERNEL_STEPS,
        "ratio": guarded.total() / plain.total(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="count kernel launches instead")
    parser.add_argument("--json", action="store_true", help="for a program")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = kernels() if asked.kernels else calls()
    if asked.json:
        print(json.dumps(found, indent=2))
    elif asked.kernels:
        for name, row in found.items():
            for what in ("operators", "launches"):
                plain, guarded, ratio = row[what].values()
                print(f"{name}, {what} per step: {plain:.2f} plain, {guarded:.2f} guarded, ratio {ratio:.4f}")
            print("".join(f"  {more:+8.3f} {op}\n" for op, more in row["more_launches"].items()))
    else:
        print("".join(f"{count:5} {name}\n" for name, count in found["by_file"].items()))
        print(f"{found['files']} files, {found['calls']} calls in the median step")
        print(
            f"{found['mean_calls']:.1f} calls in the mean; at most {found['max_calls']} in {found['max_files']} files"
        )


if __name__ == "__main__":
    main()
