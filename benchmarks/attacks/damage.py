"""Damage with nothing, or hardly anything, to go back to: what does the run come to?

The first run before a state is trusted, the first steps after a resume, right after a rollback, `careful` mode,
`auto_recovery: false`, no room for snapshots; weights, buffers, moments and averaged weights that are damaged while
loss and gradients stay finite. A case passes when

* the run goes on to its end with everything finite, or halts where it must not roll back, with finite weights in place
  if any are on disk, and says so truly;
* no checkpoint holds NaN or infinity, and the next start goes on from them;
* its held-out loss is no worse than that of the same run without a guard, by 5 % or by 0.02.

    python benchmarks/attacks/damage.py --seed 1 --out build/attacks/damage.jsonl
"""

import argparse
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from networks import NETWORKS, OPTIMIZERS, Task, not_finite, tensors_of
from table import Rows, arguments
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import steadystep
from steadystep._utils.text import quiet_log
from steadystep.checkpoints.checkpoint import read_checkpoint
from steadystep.checkpoints.store import CheckpointStore

_STEPS = 140
_AVERAGE = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
_BAD = (math.nan, math.inf, -math.inf)
_HUGE = (1e38, -1e38)

Damage = Callable[["Run", random.Random], None]


class Run:
    """A network on its way, damaged before some of its steps."""

    def __init__(self, seed: int, network: str, optimizer: str, damage: Damage, at: tuple[int, ...]) -> None:
        torch.manual_seed(seed)
        self.task, self.model = Task(seed), NETWORKS[network]()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.average = AveragedModel(self.model, multi_avg_fn=_AVERAGE, use_buffers=True)
        self._damage, self._at, self._rng = damage, at, random.Random(seed)

    def before(self, step: int) -> None:
        """Between two steps."""
        if step in self._at:
            self._damage(self, self._rng)

    def loss(self, step: int) -> Tensor:
        """Of one step."""
        x, y = self.task.batch(step)
        return F.mse_loss(self.model(x), y)

    def plain(self) -> float:
        """To the end without a guard; the held-out loss."""
        for step in range(_STEPS):
            self.before(step)
            self.optimizer.zero_grad()
            self.loss(step).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return self.task.held_out(self.model)

    def guarded(self, folder: Path | None, settings: dict[str, Any], until: int = _STEPS) -> str:
        """From where the last one ended; "" or what it halted with."""
        if folder is None:
            guard = steadystep.Guard(self.model, self.optimizer, config=settings)
        else:
            saves = {"save_checkpoints": True, "checkpoint_frequency": 2}
            guard = steadystep.Guard.resume(
                self.model, self.optimizer, run_dir=folder, config={"monitoring": saves} | settings
            )
        guard.keep("average", self.average)
        try:
            with guard:
                while guard.attempts < until:
                    step = guard.attempts
                    self.before(step)
                    guard.step(self.loss, batch=step)
                    self.average.update_parameters(self.model)
        except steadystep.TrainingHalted as halt:
            return str(halt)
        return ""


def weight(run: Run, rng: random.Random) -> None:
    """NaN or infinity in some weight."""
    _spoil([p.data for p in run.model.parameters()], rng, _BAD)


def masked(run: Run, rng: random.Random) -> None:
    """An infinity that a gate turns into a one or a zero, so that the loss stays finite."""
    names = {"g.bias", "lstm.bias_ih_l0"}
    gates = [p.data for name, p in run.model.named_parameters() if name in names]
    # why the first three quarters of an LSTM's but its cell: input and forget gates are sigmoids
    size = 12 if isinstance(getattr(run.model, "g", None), nn.Linear) else 20
    gates[0][rng.randrange(size)] = rng.choice((math.inf, -math.inf))


def statistic(run: Run, rng: random.Random) -> None:
    """NaN, infinity or 1e38 in a running statistic."""
    _spoil([b for name, b in run.model.named_buffers() if "running" in name], rng, (*_BAD, *_HUGE))


def constant(run: Run, rng: random.Random) -> None:
    """NaN in a buffer that nobody writes, half of the time where no version counter sees it."""
    named = [b for name, b in run.model.named_buffers() if name in ("scale", "positions")]
    _spoil([rng.choice((b, b.data)) for b in named], rng, (math.nan,))


def moment(run: Run, rng: random.Random) -> None:
    """NaN, infinity or 1e38 in a moment."""
    held = [v for slots in run.optimizer.state.values() for v in slots.values()]
    _spoil([v for v in held if isinstance(v, Tensor) and v.numel() > 1], rng, (*_BAD, *_HUGE))


def averaged(run: Run, rng: random.Random) -> None:
    """NaN or infinity in the averaged weights."""
    _spoil([p.data for p in run.average.parameters()], rng, _BAD)


def _spoil(tensors: list[Tensor], rng: random.Random, values: tuple[float, ...]) -> None:
    chosen = rng.choice(tensors)
    chosen.view(-1)[rng.randrange(chosen.numel())] = rng.choice(values)


_OFF = {"training": {"auto_recovery": False}}
_CAREFUL = {"mode": "careful"}
_NO_ROOM = {"recovery": {"snapshot_memory_gb": 1e-9}}
_ANY = tuple(NETWORKS)

# what is damaged, networks, optimizers, settings, steps at which it may be damaged, resumed at (0: not at all), on disk
CASES: dict[str, tuple[Damage, tuple[str, ...], tuple[str, ...], dict[str, Any], range, int, bool]] = {
    "a weight, before any state is trusted": (weight, _ANY, ("AdamW",), {}, range(1, 40), 0, False),
    "a weight, in the first run": (weight, _ANY, ("AdamW",), {}, range(60, 110), 0, True),
    "a weight, just after a resume": (weight, _ANY, ("AdamW",), {}, range(42, 60), 42, True),
    "a weight, just after a rollback": (weight, _ANY, ("AdamW",), {}, range(62, 70), 0, True),
    "a weight, no room for snapshots": (weight, _ANY, ("AdamW",), _NO_ROOM, range(40, 110), 0, True),
    "a weight, careful, on disk": (weight, _ANY, ("AdamW",), _CAREFUL, range(43, 110), 42, True),
    "a weight, careful, nothing on disk": (weight, _ANY, ("AdamW",), _CAREFUL, range(5, 110), 0, False),
    "a weight, auto_recovery: false": (weight, _ANY, ("AdamW",), _OFF, range(5, 110), 0, True),
    "a masked weight, in the first run": (masked, ("gate", "lstm"), ("AdamW",), {}, range(1, 110), 0, False),
    "a masked weight, just after a resume": (masked, ("gate", "lstm"), ("AdamW",), {}, range(42, 60), 42, True),
    "a masked weight, careful": (masked, ("gate", "lstm"), ("AdamW",), _CAREFUL, range(42, 110), 42, True),
    "a running statistic": (statistic, ("dense", "convolutions"), tuple(OPTIMIZERS), {}, range(3, 120), 0, True),
    "a running statistic, careful": (
        statistic,
        ("dense", "convolutions"),
        ("AdamW",),
        _CAREFUL,
        range(3, 120),
        0,
        True,
    ),
    "a constant buffer": (constant, ("lstm", "attention", "gate"), tuple(OPTIMIZERS), {}, range(3, 120), 0, True),
    "a constant buffer, careful": (
        constant,
        ("lstm", "attention", "gate"),
        ("AdamW",),
        _CAREFUL,
        range(3, 120),
        0,
        True,
    ),
    "a moment of AdamW": (moment, _ANY, ("AdamW",), {}, range(3, 110), 0, True),
    "a moment that only its sign counts of": (moment, _ANY, ("sign of a momentum",), {}, range(3, 110), 0, True),
    "a moment that only its direction counts of": (
        moment,
        _ANY,
        ("direction of a momentum",),
        {},
        range(3, 110),
        0,
        True,
    ),
    "averaged weights that are kept": (averaged, _ANY, ("AdamW",), {}, range(25, 110), 0, False),
}


def attack(name: str, seed: int) -> tuple[str, str, float, float]:
    """Which case exactly; what is wrong with it (nothing: ""); the held-out losses with and without a guard."""
    damage, networks, optimizers, settings, steps, resumed, on_disk = CASES[name]
    rng = random.Random(f"{name} {seed}")
    network, optimizer, at = rng.choice(networks), rng.choice(optimizers), rng.choice(steps)
    twice = (at, at + rng.randrange(1, 4)) if "after a rollback" in name else (at,)
    case = f"{network}, {optimizer}, step {', '.join(map(str, twice))}, seed {seed}"
    plain = Run(seed, network, optimizer, damage, twice).plain()
    halts = settings in (_OFF, _CAREFUL) and damage in (weight, masked)
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder) if on_disk else None
        if resumed:
            Run(seed, network, optimizer, damage, ()).guarded(folder, settings, until=resumed)
        run = Run(seed, network, optimizer, damage, twice)
        said = run.guarded(folder, settings)
        wrong = _wrong_end(run, said, halts=halts, on_disk=on_disk) or _wrong_files(folder)
        if not wrong and said and folder is not None:  # the next start
            run = Run(seed, network, optimizer, damage, ())
            wrong = run.guarded(folder, settings)
    kept = math.nan if said and not on_disk else run.task.held_out(run.model)
    if not wrong and not said and math.isfinite(plain) and not kept <= plain + max(0.05 * plain, 0.02):
        wrong = f"worse: {kept:.4f}, {plain:.4f} without a guard"
    return case, wrong, kept, plain


def _wrong_end(run: Run, said: str, *, halts: bool, on_disk: bool) -> str:
    weights = {name: p.detach() for name, p in run.model.named_parameters()}
    if halts:
        if not said:
            return "it did not halt"
        if on_disk:
            return f"halted with weights that are not finite: {said}" if not_finite(weights) else ""
        return "" if "no better weights" in said or not not_finite(weights) else f"it says: {said}"
    if said:
        return f"halted: {said}"
    left = tensors_of(run.model, run.optimizer) | {f"average {n}": p for n, p in run.average.named_parameters()}
    bad = not_finite(left)
    return f"not finite at the end: {', '.join(bad[:4])}" if bad else ""


def _wrong_files(folder: Path | None) -> str:
    if folder is None:
        return ""
    found = [read_checkpoint(path) for path in sorted((folder / "checkpoints").glob("step-*"))]
    bad = [f"{one.path.name}: {one.not_finite[0]}" for one in found if one.not_finite]
    return f"checkpoints that are not finite: {', '.join(bad)}" if bad else ""


def older_version(seed: int) -> tuple[str, str, float, float]:
    """The last checkpoints hold NaN, as an older version wrote them before a halt."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Run(seed, "dense", "AdamW", weight, ()).guarded(folder, {}, until=40)
        good = CheckpointStore(folder / "checkpoints").newest()
        assert good is not None
        for step in (42, 44, 46):
            parameters = {key: t * math.nan for key, t in good.state["parameters"].items()}
            poisoned = {key: part for key, part in good.state.items() if key != "finite"} | {"parameters": parameters}
            CheckpointStore(folder / "checkpoints", keep_last=9).put(poisoned, step=step, updates=step)
        run = Run(seed, "dense", "AdamW", weight, ())
        said = run.guarded(folder, {})
        bad = not_finite(tensors_of(run.model, run.optimizer))
        return f"dense, AdamW, seed {seed}", said or ", ".join(bad) or _wrong_files(folder), 0.0, 0.0


def main() -> int:
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--repeats", type=int, default=3, help="how often each kind is tried (default 3)")
    options = arguments(__doc__, more=more)
    torch.set_num_threads(1)
    with Rows(options.out) as rows, warnings.catch_warnings(), quiet_log():
        warnings.simplefilter("ignore")
        for number in range(options.repeats):
            seed = 1000 * options.seed + number
            for name in CASES:
                case, wrong, kept, plain = attack(name, seed)
                rows.add(name, case, passed=not wrong, said=wrong, kept=kept, plain=plain)
            case, wrong, _, _ = older_version(seed)
            rows.add("checkpoints poisoned by an older version", case, passed=not wrong, said=wrong)
        return rows.finish()


if __name__ == "__main__":
    sys.exit(main())
