"""A deep post-LN transformer without warm-up, with a short and with a longer one, beside the same in pre-LN.

Post-LN has large gradients near its output at the start, and Adam's second moment knows nothing yet: with a large first
step the model falls back to guessing bytes by their frequency and stays there (Xiong et al. 2020, Liu et al. 2020).
Adam as torch ships it, a constant rate after the warm-up, no clipping: the warm-up is the only difference. Run:

    python benchmarks/post_ln.py            # 8 layers, 600 steps, seeds 100 to 102: a few minutes on a core
    python benchmarks/post_ln.py --quick    # one seed, 60 steps: shows that it runs, no more
    python benchmarks/post_ln.py --json     # for a program
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor

from lr_sensitivity import BATCH_SIZE, code, train
from steadystep.lab.tasks.text import GPT, NUM_BYTES, GPTParts, GPTSize, TopicsText
from steadystep.schedule import constant, warmup
from stored.jobs import Row, results
from stored.table import show

LR = 3e-3
SIZE = GPTSize(num_layers=8)
WARMUPS = (0, 100, 200)
NUM_STEPS = 600
LEARNED = 0.1
"""Nats below guessing by frequency; a model that is not so far is stalled."""
_OUT = Path(__file__).parent / "results" / "post_ln.jsonl"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run to make."""

    norm: str
    warmup_steps: int
    seed: int
    num_steps: int

    @property
    def key(self) -> str:
        """What the result depends on: the run itself and the code it is made with."""
        return json.dumps(asdict(self) | {"code": code(__file__)}, sort_keys=True)


def run(case: Case) -> Row:
    """Train, and say how it ended."""
    torch.manual_seed(case.seed)
    model = GPT(SIZE, GPTParts(norm="post" if case.norm == "post" else "pre"))
    text = TopicsText(context=SIZE.context, batch_size=BATCH_SIZE, seed=case.seed)
    schedule = warmup(case.warmup_steps) if case.warmup_steps else constant()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    seen = train(model, optimizer, text, model.loss, schedule, num_steps=case.num_steps, look_every=100)
    guessing = by_frequency(text)
    return {"seen": seen, "after": seen[-1], "guessing": guessing, "verdict": verdict(seen, guessing)}


def by_frequency(text: TopicsText) -> float:
    """The held-out loss of the best guess that knows no context: the held-out bytes' own frequencies."""
    counts: Tensor = torch.bincount(text.held_out()[:, 1:].flatten(), minlength=NUM_BYTES).double()
    share = counts[counts > 0] / counts.sum()
    return -(share * share.log()).sum().item()


def verdict(seen: list[float], guessing: float) -> str:
    """learned, stalled at guessing, or diverged."""
    if not math.isfinite(seen[-1]) or seen[-1] > seen[0]:
        return "diverged"
    return "learned" if seen[-1] < guessing - LEARNED else "stalled"


def report(rows: list[Row]) -> dict[str, Any]:
    """One line per arm; returns the lines."""
    lines: list[dict[str, Any]] = []
    for norm, steps in dict.fromkeys((row["norm"], row["warmup_steps"]) for row in rows):
        mine = [row for row in rows if (row["norm"], row["warmup_steps"]) == (norm, steps)]
        lines.append(
            {
                "model": f"{norm}-LN",
                "warm-up": f"{steps} steps" if steps else "none",
                "held-out loss": f"{fmean(row['after'] for row in mine):.3f}",
                "by seed": " ".join(f"{row['after']:.3f}" for row in mine),
                "verdicts": ", ".join(row["verdict"] for row in mine),
            }
        )
    title = f"{SIZE.num_layers} layers, Adam {LR:g}; guessing by frequency: {rows[0]['guessing']:.3f}"
    show(title, list(lines[0]), [list(line.values()) for line in lines])
    return {"lines": lines, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--out", type=Path, default=_OUT)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args()
    seeds, steps = (args.seeds[:1], 60) if args.quick else (args.seeds, NUM_STEPS)
    rises = [rise * steps // NUM_STEPS for rise in WARMUPS]
    cases = [
        Case(norm=norm, warmup_steps=rise, seed=seed, num_steps=steps)
        for seed in seeds
        for norm in ("post", "pre")
        for rise in rises
    ]
    told = report(results(cases, run, out=args.out, workers=args.workers))
    if args.json:
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
