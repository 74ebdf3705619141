"""A long run with hundreds of faults: is the learning rate given back each time, and does nothing grow?

A small network (BatchNorm, AdamW, a cosine schedule with warm-up) trains on a stream of batches, and every few hundred
steps something goes wrong, of a kind drawn from the seed: a NaN or infinity in the batch, the loss or a gradient, a
gradient a thousand times too large, a learning rate a hundred times too high for one step, a bit flipped in a weight, a
weight or a moment or a running statistic that is not finite, shuffled labels for one batch. It passes when

* the learning rate in use is below 0.9 of the one that was asked for in less than 5 % of the steps,
* the run ends finite, was not halted, and its loss is within a tenth of the run without faults,
* resident memory, open descriptors, threads and the guard's own state do not grow in the second half, and the files of
  the run grow by what a step writes and no more.

    python benchmarks/attacks/soak.py --out build/attacks/soak.jsonl            # 200,000 steps, 400 faults
    python benchmarks/attacks/soak.py --steps 5000 --faults 25
"""

import argparse
import gc
import json
import math
import os
import random
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from table import Rows, arguments
from torch import Tensor, nn

import steadystep
from steadystep._utils.text import quiet_log

_SLACK = 24 << 20  # bytes of resident memory: what allocators keep
_BUNDLES = 20
_LEAST = 0.9  # of the rate that was asked for


@dataclass
class Measured:
    """What a process holds at one moment."""

    step: int
    resident: int
    descriptors: int
    threads: int
    state: int
    files: int
    """Without those of incidents, of which so many are kept."""
    bundles: int
    log: int
    """Bytes."""


@dataclass
class Soak:
    """How a run went."""

    steps: int = 0
    low: int = 0
    """Steps with less than 0.9 of the learning rate that was asked for."""
    halted: str = ""
    losses: list[float] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    finite: bool = True


class Task:
    """A network, its data, and ways to break them for one step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.data = torch.Generator().manual_seed(seed + 1)
        self.fault = ""

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8, generator=self.data)
        noise = 0.1 * torch.randn(32, 1, generator=self.data)
        return x, x[:, :4].sin().sum(1, keepdim=True) + noise

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


def _in_weight(value: float) -> Callable[[Task, random.Random], None]:
    def damage(task: Task, rng: random.Random) -> None:
        with torch.no_grad():
            weight = rng.choice([p for p in task.model.parameters() if p.dim() == 2]).view(-1)
            weight[rng.randrange(len(weight))] = value

    return damage


def _bit(task: Task, rng: random.Random) -> None:
    with torch.no_grad():
        weight = rng.choice([p for p in task.model.parameters() if p.dim() == 2]).view(-1)
        weight.view(torch.int32)[rng.randrange(len(weight))] ^= 1 << 30


def _moment(task: Task, rng: random.Random) -> None:
    state = rng.choice([s for s in task.optimizer.state.values() if s])
    state["exp_avg"].view(-1)[0] = math.nan


def _statistic(task: Task, rng: random.Random) -> None:
    norm = task.model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    norm.running_mean[rng.randrange(len(norm.running_mean))] = rng.choice((math.nan, 1e38))


BETWEEN: dict[str, Callable[[Task, random.Random], None]] = {
    "NaN weight": _in_weight(math.nan),
    "huge weight": _in_weight(1e6),
    "flipped bit": _bit,
    "NaN moment": _moment,
    "bad statistic": _statistic,
}
DURING = ("NaN batch", "infinite batch", "NaN loss", "NaN gradient", "gradient x 1000", "rate x 100", "shuffled labels")


def soak(seed: int, steps: int, faults: int, folder: Path, *, progress: Callable[[str], None]) -> Soak:
    """One run."""
    rng, task, done = random.Random(seed), Task(seed), Soak()
    kinds = [*BETWEEN, *DURING]
    due = {(i + 1) * steps // (faults + 1): kinds[i % len(kinds)] for i in range(faults)}
    settings: dict[str, Any] = {
        "monitoring": {"save_checkpoints": True, "checkpoint_frequency": max(50, steps // 400), "sinks": []},
        "training": {"max_recovery_attempts": 1000},
        "recovery": {"max_skips": 1000, "incident_batch_mb": 0},
    }
    first: Any = next(task.model.parameters())
    hook = first.register_hook(lambda grad: _spoilt(grad, task.fault))
    asked = task.optimizer.param_groups[0]["lr"]
    with steadystep.Guard(task.model, task.optimizer, config=settings, run_dir=folder) as guard:
        for step in range(steps):
            task.fault = due.get(step, "")
            rate = asked * _schedule(step, steps)
            task.optimizer.param_groups[0]["lr"] = rate * (100.0 if task.fault == "rate x 100" else 1.0)
            if task.fault in BETWEEN:
                BETWEEN[task.fault](task, rng)
            try:
                outcome = guard.step(lambda batch: _faulty(task, batch), batch=_with(task.fault, task.batch()))
            except steadystep.TrainingHalted as halt:
                done.halted = str(halt).splitlines()[0]
                break
            _count(done, outcome, rate)
            if step % max(1, steps // 40) == steps // 80:
                done.measured.append(_measure(step, guard, folder))
                now = done.measured[-1]
                progress(f"  step {step}: {100.0 * done.low / done.steps:.2f} % low, {now.resident >> 20} MB")
        hook.remove()
    done.finite = all(bool(p.isfinite().all()) for p in [*task.model.parameters(), *task.model.buffers()])
    return done


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 200)
    return warm * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / steps)))


def _with(fault: str, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = batch
    if fault == "NaN batch":
        x[0, 0] = math.nan
    elif fault == "infinite batch":
        x[0, 0] = math.inf
    elif fault == "shuffled labels":
        y = y.flip(0)
    return x, y


def _faulty(task: Task, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = task.loss(batch)
    return loss * math.nan if task.fault == "NaN loss" else loss


def _spoilt(grad: Tensor, fault: str) -> Tensor:
    if fault == "NaN gradient":
        return grad * math.nan
    return grad * 1000.0 if fault == "gradient x 1000" else grad


def _count(done: Soak, outcome: steadystep.Outcome, rate: float) -> None:
    done.steps += 1
    done.low += outcome.stepped and outcome.lr_mult * (outcome.signals.lr if outcome.signals else rate) < _LEAST * rate
    done.losses.append(outcome.loss)
    if outcome.plan.actions:
        done.causes[outcome.diagnosis.cause] += 1
        done.actions["+".join(outcome.plan.actions)] += 1


def _measure(step: int, guard: steadystep.Guard, folder: Path) -> Measured:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    incidents = folder / "incidents"
    found = [
        name
        for place, _, names in os.walk(folder)  # not rglob: a checkpoint may be taken away meanwhile
        if incidents not in (Path(place), *Path(place).parents)
        for name in names
    ]
    return Measured(
        step=step,
        resident=resident,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        state=len(json.dumps(guard.state_dict())),
        files=len(found),
        bundles=len(list(incidents.glob("incident-*"))),
        log=(folder / "run.jsonl").stat().st_size,
    )


def judge(rows: Rows, broken: Soak, whole: Soak, faults: int) -> None:
    """The rows of the table."""

    def said(name: str, case: str, passed: bool, why: str = "", **numbers: float) -> None:
        rows.add(name, case, passed=passed, said="" if passed else why, **numbers)

    low = broken.low / max(1, broken.steps)
    said("learning rate", f"in use below 0.9 for {100 * low:.2f} % of the steps", low < 0.05, "5 % allowed", low=low)
    said("learning rate", "as asked for where there is no fault", whole.low == 0, f"{whole.low} steps low")
    said("end", f"{broken.steps:,} steps with {faults} faults, not halted", not broken.halted, broken.halted)
    said("end", "weights and buffers finite", broken.finite)
    ends = _usual(broken.losses), _usual(whole.losses)
    said(
        "end", f"loss {ends[0]:.4g}, {ends[1]:.4g} without faults", ends[0] <= 1.1 * ends[1], "a tenth more is allowed"
    )
    half = broken.measured[len(broken.measured) // 2 :]
    if not half:
        return
    first, last = half[0], half[-1]
    for name, allowed in (("resident", _SLACK), ("descriptors", 0), ("threads", 0), ("state", 4096), ("files", 2)):
        then, now = getattr(first, name), getattr(last, name)
        case = f"{name}: {then:,} at step {first.step:,}, {now:,} at {last.step:,}"
        said("growth", case, now - then <= allowed, f"grew by {now - then:,}", grown=float(now - then))
    said("growth", f"{last.bundles} incident bundles", last.bundles <= _BUNDLES, f"at most {_BUNDLES} are kept")
    each = (last.log - first.log) / max(1, last.step - first.step)
    said("growth", f"the log: {each:.0f} bytes per step", each < 150.0, "150 allowed", each=each)


def _usual(losses: list[float]) -> float:
    """The mean of the last twentieth without its highest tenth: the faults themselves are no part of it."""
    last = sorted(filter(math.isfinite, losses[-max(1, len(losses) // 20) :]))  # NaN has no place in an order
    kept = last[: max(1, len(last) * 9 // 10)]
    return sum(kept) / len(kept)


def main(argv: list[str] | None = None) -> int:
    """The run, and its twin without faults."""
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--steps", type=int, default=200_000)
    more.add_argument("--faults", type=int, default=400)
    options = arguments(__doc__, argv, more=more)
    torch.set_num_threads(1)

    def progress(text: str) -> None:
        print(text, file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder, Rows(options.out) as rows:
        with quiet_log(), warnings.catch_warnings(action="ignore"):
            broken = soak(options.seed, options.steps, options.faults, Path(folder) / "broken", progress=progress)
            whole = soak(options.seed, min(options.steps, 20_000), 0, Path(folder) / "whole", progress=lambda _: None)
        judge(rows, broken, whole, options.faults)
        code = rows.finish()
        for name, found in (("causes", broken.causes), ("actions", broken.actions)):
            print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in found.most_common()))
        return code


if __name__ == "__main__":
    sys.exit(main())
