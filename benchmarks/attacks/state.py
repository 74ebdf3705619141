"""Resume from forged checkpoints: a state of wrong type, size or value is refused whole, or the run goes on.

    python benchmarks/attacks/state.py --cases 600 --seed 0 --out build/attacks/state.jsonl

Passed: `CheckpointError` with not a bit of weights, buffers, optimizer, guard or random numbers changed; or the state
was loaded, the weights are those of the file, and the run goes on for another epoch with finite weights.
"""

import argparse
import contextlib
import json
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forging import Forgery, forge
from table import Rows, arguments
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steadystep
from steadystep.checkpoints.checkpoint import read_checkpoint


class Net(nn.Module):
    """Buffers of both kinds: statistics that are saved, a mask that is not part of the model's own state."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor
        self.scale: Tensor
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
        self.register_buffer("mask", torch.ones(16, 16).tril())
        self.register_buffer("scale", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Use all of them."""
        y: Tensor = self.body[0](x * self.scale)
        return self.body[2:](self.body[1](y) @ self.mask)  # type: ignore[no-any-return]


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not know: the sign of a mean of gradients (Chen et al. 2023)."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p]
                if not held:
                    held["exp_avg"], held["step"] = torch.zeros_like(p), 0
                held["step"] += 1
                slow, fast = group["betas"][1], group["betas"][0]
                p.add_(held["exp_avg"].mul(fast).add(p.grad, alpha=1 - fast).sign_(), alpha=-group["lr"])
                held["exp_avg"].mul_(slow).add_(p.grad, alpha=1 - slow)


Program = tuple[nn.Module, torch.optim.Optimizer, Callable[[], steadystep.Guard], Any]

PROGRAMS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW, cosine, z-score clip": (
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        {"learning_rate": 1e-3, "lr_scheduler": "cosine", "warmup_steps": 4, "total_steps": 200, "clip_rule": "zscore"},
    ),
    "SGD, fp16, plateau": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        {"mixed_precision": "fp16", "lr_scheduler": "plateau", "early_stopping": True, "max_grad_norm": 1.0},
    ),
    "an unknown optimizer": (Lion, {"clip_rule": "percentile", "gradient_accumulation_steps": 2}),
    "Adagrad, per-tensor clip": (lambda p: torch.optim.Adagrad(p, lr=0.01), {"clip_rule": "tensor-ema"}),
}


def start(name: str, run_dir: Path, seed: int) -> Program:
    """One program, with its random numbers as a new process has them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    make, training = PROGRAMS[name]
    model = Net()
    optimizer = make(model.parameters())
    config = {"training": training, "monitoring": {"sinks": [], "checkpoint_frequency": 1000}}
    data = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    return model, optimizer, lambda: steadystep.Guard.resume(model, optimizer, run_dir=run_dir, config=config), loader


def epoch(model: nn.Module, guard: steadystep.Guard, loader: Any, most: int = 48) -> None:
    """What a training program does."""
    for number, (x,) in enumerate(guard.batches(loader)):
        guard.step(lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), batch=x, metrics={"entropy": 1.0})
        if number >= most:
            break
    guard.validate(float(torch.rand(())))


def source(name: str, folder: Path) -> Path:
    """A checkpoint in the middle of an epoch."""
    model, _, resume, loader = start(name, folder, seed=0)
    guard = resume()
    for _ in range(3):
        epoch(model, guard, loader)
    epoch(model, guard, loader, most=6)
    guard.close()
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """All that must not change, in a form that tells one bit from another."""
    held = {
        name: t.detach().clone().view(-1).tolist() for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    moments = json.dumps(optimizer.state_dict(), default=lambda v: v.tolist() if isinstance(v, Tensor) else repr(v))
    numbers = torch.get_rng_state().sum().item(), random.getstate()[1][:3], np.random.get_state()[1][:3].tolist()  # type: ignore[index]
    return json.dumps([held, moments, repr(numbers)])


def attempt(name: str, made: Path, folder: Path) -> tuple[str, str]:
    """Whether it passed, and how it ended."""
    model, optimizer, resume, loader = start(name, folder, seed=5)
    before = bits(model, optimizer)
    try:
        guard = resume()
    except steadystep.CheckpointError as error:
        same = bits(model, optimizer) == before
        return ("refused", str(error)) if same else ("CHANGED", f"refused, and something was changed: {error}")
    except BaseException as error:
        return "FAILED", f"resume: {type(error).__name__}: {error}"
    try:
        held = read_checkpoint(made).state["parameters"]
        if any(not torch.equal(p.detach(), held[n].to(p.dtype)) for n, p in model.named_parameters()):
            return "FAILED", "the weights are not those of the file"
        live = guard.state_dict()
        guard.load_state_dict(live)
        epoch(model, guard, loader)
        guard.diagnose()
        finite = all(bool(t.isfinite().all()) for t in [*model.parameters(), *model.buffers()])
        return ("loaded", "") if finite else ("FAILED", "weights or buffers are not finite")
    except steadystep.TrainingHalted as error:
        return "FAILED", f"loaded, and then halted: {error}"
    except Exception as error:
        return "FAILED", f"loaded, and then: {type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(Exception):
            guard._end(save=False)


def live(name: str, made: Path, folder: Path) -> tuple[str, str]:
    """The guard's part of it, given to a guard in the middle of a run."""
    forged = read_checkpoint(made).state["guard"]
    model, optimizer, resume, loader = start(name, folder / "live", seed=6)
    guard = resume()
    try:
        epoch(model, guard, loader)
        before = bits(model, optimizer), json.dumps(guard.state_dict())
        try:
            guard.load_state_dict(forged)
        except steadystep.CheckpointError as error:
            same = (bits(model, optimizer), json.dumps(guard.state_dict())) == before
            return ("refused", str(error)) if same else ("CHANGED", str(error))
        epoch(model, guard, loader)
        return "loaded", ""
    except Exception as error:
        return "FAILED", f"load_state_dict: {type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(Exception):
            guard._end(save=False)


def one(name: str, base: Path, seed: int) -> tuple[Forgery, str, str]:
    """One forged checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "checkpoints"
        checkpoints.mkdir()
        done: Forgery = forge(base, checkpoints, random.Random(seed))
        made = checkpoints / base.name
        how, why = attempt(name, made, Path(folder))
        if how in ("refused", "loaded") and done.where.startswith("guard."):
            with contextlib.suppress(steadystep.CheckpointError):  # the file itself cannot be read
                again, why_again = live(name, made, Path(folder))
                how, why = (again, why_again) if again not in ("refused", "loaded") else (how, why)
    return done, how, why


def main() -> int:
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--cases", type=int, default=600)
    options = arguments(__doc__, more=more)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, Rows(options.out) as rows:
        bases = {name: source(name, Path(folder) / str(i)) for i, name in enumerate(PROGRAMS)}
        names = list(PROGRAMS)
        for number in range(options.cases):
            name = names[number % len(names)]
            done, how, why = one(name, bases[name], options.seed * 1_000_003 + number)
            results[how] += 1
            case = f"{number}: {name}: {done.where}: {done.what}"
            rows.add(f"wrong {done.kind}", case, passed=how in ("refused", "loaded"), said=f"{how} {why[:300]}")
    print(", ".join(f"{count} {how}" for how, count in sorted(results.items())))
    return rows.finish()


if __name__ == "__main__":
    sys.exit(main())
