"""How much the choice of the learning rate matters, with the prevention tools and without.

    LR sensitivity = mean over the learning rates of min(loss, loss_0) - best loss      (Wortsman et al. 2023)

`loss` is the held-out loss at the end (loss_0 if it is not finite), loss_0 the held-out loss before the first update,
and the best loss that of the best learning rate of the same arm and seed. 0 means: any rate does. Arms and what is in
them are in ARMS; all share model size, data, order of batches, number of steps and Adam's betas. Run:

    python benchmarks/lr_sensitivity.py                   # all arms, 7 rates, 2 seeds: 20 to 40 minutes on one core
    python benchmarks/lr_sensitivity.py --arms nothing    # one arm
    python benchmarks/lr_sensitivity.py --quick           # 4 rates, one seed, 200 steps: shows that it runs, no more
    python benchmarks/lr_sensitivity.py --json            # for a program

Seed 0 was for choosing, 100 and 101 are for reporting. Results are kept in --out, one line per run, and made again only
when the code they depend on has changed.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from steadystep.clip import clip_global_norm_
from steadystep.groups import Rule, param_groups
from steadystep.init import initialise_
from steadystep.lab.tasks.text import GPT, GPTParts, GPTSize, TopicsText
from steadystep.layers import ClippedUpdates, z_loss
from steadystep.schedule import Schedule, constant, linear, wsd
from stored.jobs import Row, results
from stored.table import show

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
NUM_STEPS = 1200
BATCH_SIZE = 8
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01  # torch's own
_ROOT = Path(__file__).parent.parent / "src" / "steadystep"
_OUT = Path(__file__).parent / "results" / "lr_sensitivity.jsonl"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Which tools are used; the defaults are none: AdamW as it comes, at a constant rate."""

    scheduled: bool = False
    """Warm-up over a twelfth of the steps, a constant rate, and over the last half a line down to 0."""
    max_grad_norm: float | None = None
    qk_norm: bool = False
    gpt2_init: bool = False
    z_loss: float = 0.0
    clipped_updates: bool = False
    """By RMS_t, as StableAdamW does."""
    grouped: bool = False
    """Norm layers learn a tenth as fast; no weight decay on norms, biases and embeddings."""


ARMS = {
    "nothing": Arm(),
    "everything": Arm(
        scheduled=True,
        max_grad_norm=1.0,
        qk_norm=True,
        gpt2_init=True,
        z_loss=1e-4,
        clipped_updates=True,
        grouped=True,
    ),
    "clip + schedule": Arm(scheduled=True, max_grad_norm=1.0),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run to make."""

    arm: str
    lr: float
    seed: int
    num_steps: int

    @property
    def key(self) -> str:
        """What the result depends on: the run itself and the code it is made with."""
        return json.dumps(asdict(self) | {"code": code(__file__)}, sort_keys=True)


@cache
def code(script: str) -> str:
    """A digest of a benchmark and of the parts it trains with."""
    parts = ("lab", "layers", "init", "groups", "schedule", "clip")
    files = [Path(script), Path(__file__), *sorted(path for part in parts for path in (_ROOT / part).glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def run(case: Case) -> Row:
    """Train and look at the held-out text before and after."""
    arm = ARMS[case.arm]
    torch.manual_seed(case.seed)
    size = GPTSize()
    model = GPT(size, GPTParts(attention="stable" if arm.qk_norm else "plain"))
    if arm.gpt2_init:
        initialise_(model, "gpt2", seed=case.seed)
    optimizer = torch.optim.AdamW(_groups(model, arm, case.lr), lr=case.lr, betas=BETAS)
    if arm.clipped_updates:
        ClippedUpdates(optimizer)

    def loss(text: Tensor) -> Tensor:
        logits = model(text[:, :-1])
        plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        return plain + z_loss(logits, arm.z_loss) if arm.z_loss else plain

    rise, fall = case.num_steps // 12, case.num_steps // 2
    schedule = wsd(rise, case.num_steps - rise - fall, fall, curve=linear) if arm.scheduled else constant()
    text = TopicsText(context=size.context, batch_size=BATCH_SIZE, seed=case.seed)
    before, *_, after = train(
        model, optimizer, text, loss, schedule, num_steps=case.num_steps, max_grad_norm=arm.max_grad_norm
    )
    return {"before": before, "after": after}


def _groups(model: GPT, arm: Arm, lr: float) -> list[dict[str, Any]]:
    if not arm.grouped:
        return [{"params": list(model.parameters()), "weight_decay": WEIGHT_DECAY}]
    return param_groups(model, lr=lr, weight_decay=WEIGHT_DECAY, rules=Rule("*norm*", lr_mult=0.1))


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    text: TopicsText,
    loss_of: Callable[[Tensor], Tensor],
    schedule: Schedule,
    *,
    num_steps: int,
    max_grad_norm: float | None = None,
    look_every: int | None = None,
) -> list[float]:
    """The loop as anybody writes it; returns held-out losses: before, every so many steps, and at the end."""
    scheduler = LambdaLR(optimizer, schedule)
    params = list(model.parameters())
    windows = text.held_out()
    seen = [held_out(model, windows)]
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss_of(text.batch()).backward()  # type: ignore[no-untyped-call]
        if max_grad_norm is not None:
            clip_global_norm_(params, max_norm=max_grad_norm)
        optimizer.step()
        scheduler.step()
        if step == num_steps or (look_every and step % look_every == 0):
            seen.append(held_out(model, windows))
    return seen


@torch.no_grad()
def held_out(model: GPT, windows: Tensor) -> float:
    """The plain cross-entropy, whatever was trained on."""
    return model.loss(windows).item()


def counted(row: Row) -> float:
    """What a run counts: no worse than not having trained at all."""
    return min(row["after"], row["before"]) if math.isfinite(row["after"]) else float(row["before"])


def sensitivity(rows: list[Row]) -> float:
    """Of one arm and seed over all rates."""
    losses = [counted(row) for row in rows]
    return fmean(loss - min(losses) for loss in losses)


def report(rows: list[Row]) -> dict[str, Any]:
    """One line per arm; returns the lines."""
    lines: list[dict[str, Any]] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        each = [sensitivity([row for row in mine if row["seed"] == s]) for s in dict.fromkeys(r["seed"] for r in mine)]
        rates = dict.fromkeys(row["lr"] for row in mine)
        losses = {f"{lr:g}": fmean(counted(row) for row in mine if row["lr"] == lr) for lr in rates}
        lines.append({"arm": arm, **losses, "sensitivity": fmean(each), "by seed": " ".join(f"{s:.3f}" for s in each)})
    plain = next((line["sensitivity"] for line in lines if line["arm"] == "nothing"), math.nan)
    for line in lines:
        line["cut"] = "" if math.isnan(plain) else f"{1 - line['sensitivity'] / plain:.0%}"
    cells = [[f"{v:.3f}" if isinstance(v, float) else v for v in line.values()] for line in lines]
    show("Held-out loss by learning rate (mean of the seeds)", list(lines[0]), cells)
    return {"lines": lines, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="4 rates, one seed, 200 steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args()
    rates, seeds, steps = (RATES[::2], args.seeds[:1], 200) if args.quick else (RATES, args.seeds, NUM_STEPS)
    cases = [Case(arm=a, lr=lr, seed=s, num_steps=steps) for a in args.arms for s in seeds for lr in rates]
    told = report(results(cases, run, out=args.out, workers=args.workers))
    if args.json:
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
