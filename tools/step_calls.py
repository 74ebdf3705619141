"""What one healthy `Guard.step` costs in calls, files and kernels, on an MLP of four layers.

    python tools/step_calls.py            files of the package in the order in which a step enters them, with the stage
                                          in which it does, and calls; docs/walk.md tells what each does
    python tools/step_calls.py --kernels  kernel launches against a plain loop with clip_grad_norm_ and .item()

A call is a `call` event of `sys.setprofile` in a file of the package: functions, properties, comprehensions and
generators. The step that is shown is the median one of a hundred: no look at the weights and no snapshot is due at it.
A stage begins when the pipeline's method of that name is called.

Operators are all that a dispatch mode sees. Launches are those that compute or copy (views and fresh memory launch
nothing) plus reads by `.tolist()`, which a CPU does without an operator. Both loops clip at 1.0. Whole stretches are
compared, with what is due only now and then; a guard by default, and one with `monitoring.corruption_checks: off`.
"""

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import steadystep
from steadystep.watching.listeners import stop_listening

PACKAGE = Path(steadystep.__file__).parent
STAGES = ("collect", "measure", "judge", "apply", "record")
WARM_UP, COUNTED, KERNEL_STEPS = (
    300,
    100,
    640,
)  # 640: five looks at outputs and 32 at weights, as in any other such stretch
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

    def guarded(self, **monitoring: object) -> Callable[[], object]:
        """The same with a guard, and settings of its monitoring."""
        config = {"training": {"max_grad_norm": 1.0}, "monitoring": monitoring}
        guard = steadystep.Guard(self.model, self.optimizer, config=config)
        return lambda: guard.step(self.compute).loss


class Call(NamedTuple):
    """One call into the package."""

    stage: str
    file: str
    function: str
    """Its qualified name."""


def calls_of(step: Callable[[], object]) -> list[Call]:
    """Every call of one step, in order."""
    found: list[Call] = []
    root, stage = f"{PACKAGE}/", STAGES[0]
    begins = {f"Pipeline.{name}": name for name in STAGES}

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal stage
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            stage = begins.get(code.co_qualname, stage)
            found.append(Call(stage, code.co_filename.removeprefix(root), code.co_qualname))

    sys.setprofile(on_event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def recorded(warm_up: int = WARM_UP, counted: int = COUNTED) -> list[list[Call]]:
    """The calls of healthy steps, those with the fewest first."""
    gc.collect()
    nobody: Any = None
    stop_listening(nobody)  # a watcher that was dropped without remove() leaves its wrapper around backward
    step = Loop("AdamW").guarded()
    for _ in range(warm_up):
        step()
    return sorted((calls_of(step) for _ in range(counted)), key=len)


def median_step(steps: list[list[Call]]) -> list[Call]:
    return steps[len(steps) // 2]


def files_by_stage(step: list[Call]) -> dict[str, list[str]]:
    """The files that each stage calls, in the order of its first call of them."""
    return {stage: list(dict.fromkeys(call.file for call in step if call.stage == stage)) for stage in STAGES}


def first_entered(step: list[Call]) -> dict[str, list[str]]:
    """Each file once, under the stage that calls it first."""
    stage_of: dict[str, str] = {}
    for call in step:
        stage_of.setdefault(call.file, call.stage)
    return {stage: [file for file, first in stage_of.items() if first == stage] for stage in STAGES}


def calls() -> dict[str, Any]:
    """The median step of a hundred, and the mean and the largest of all."""
    steps = recorded()
    median = median_step(steps)
    by_file = Counter(call.file for call in median)
    return {
        "files": len(by_file),
        "calls": len(median),
        "mean_calls": sum(map(len, steps)) / len(steps),
        "max_calls": max(map(len, steps)),
        "max_files": max(len({call.file for call in step}) for step in steps),
        "by_file": dict(by_file),
        "by_stage": first_entered(median),
    }


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by name, and reads that are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.dispatched: Counter[str] = Counter()
        """With the ranges of torch's profiler around `step`, which a guard does not open."""
        self.of_steps: list[int] = []
        """Launches of each step."""

    @property
    def median(self) -> int:
        """Launches of the median step."""
        return sorted(self.of_steps)[len(self.of_steps) // 2]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.dispatched[str(func)] += 1
        if func.namespace == "aten":  # torch's profiler has operators too
            self.seen[str(func)] += 1
            if not func.is_view and func.overloadpacket.__name__ not in _FRESH:
                self.launched[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_of(step: Callable[[], object], *, warm_up: int = WARM_UP, counted_steps: int = KERNEL_STEPS) -> Operators:
    """Of a stretch of healthy steps, after some to warm up."""
    for _ in range(warm_up):
        step()
    counted, tolist = Operators(), Tensor.tolist

    def read(tensor: Tensor) -> Any:
        counted.launched["tolist"] += 1
        return tolist(tensor)

    with counted, patch.object(Tensor, "tolist", read):
        for _ in range(counted_steps):
            before = counted.launched.total()
            step()
            counted.of_steps.append(counted.launched.total() - before)
    return counted


def kernels() -> dict[str, Any]:
    """Operators and launches per step, and which launches make the difference."""
    found = {}
    for name in OPTIMIZERS:
        plain, guarded = operators_of(Loop(name).plain()), operators_of(Loop(name).guarded())
        both = sorted({*plain.launched, *guarded.launched})
        apart = {op: (guarded.launched[op] - plain.launched[op]) / KERNEL_STEPS for op in both}
        unchecked = operators_of(Loop(name).guarded(corruption_checks="off"))
        found[name] = {
            "operators": _compared(plain.seen, guarded.seen),
            "launches": _compared(plain.launched, guarded.launched),
            "launches, corruption checks off": _compared(plain.launched, unchecked.launched),
            "launches, corruption checks off, median step": {
                "plain": plain.median,
                "guarded": unchecked.median,
                "ratio": unchecked.median / plain.median,
            },
            "dispatched calls, corruption checks off": _compared(plain.dispatched, unchecked.dispatched),
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
            for what in [what for what in row if what != "more_launches"]:
                plain, guarded, ratio = row[what].values()
                print(f"{name}, {what} per step: {plain:.2f} plain, {guarded:.2f} guarded, ratio {ratio:.4f}")
            print("".join(f"  {more:+8.3f} {op}\n" for op, more in row["more_launches"].items()))
    else:
        rows = [(stage, file) for stage, files in found["by_stage"].items() for file in files]
        print("".join(f"{stage:8}{found['by_file'][file]:4} {file}\n" for stage, file in rows))
        print(f"{found['files']} files, {found['calls']} calls in the median step")
        print(
            f"{found['mean_calls']:.1f} calls in the mean; at most {found['max_calls']} in {found['max_files']} files"
        )


if __name__ == "__main__":
    main()
