"""What `monitoring.corruption_checks` costs: the step of a guard with it over that of a guard without.

    python benchmarks/corruption_cost.py                 the GPT of `steadystep bench overhead`, 20 blocks of 32 steps
    python benchmarks/corruption_cost.py --blocks 40 --store FILE

Four guards, `off` twice, `sampled` and `full`, take turns step by step on models of their own. Time is that of the
thread on the processor, so that waiting for one does not count; caches and memory are still shared with whatever else
runs. A block is 32 steps, in which `sampled` has checked every tensor once. Shown are median and quartiles over blocks
of the ratio to the mean of both `off`; their ratio to each other is the noise.
"""

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from steadystep import Guard
from steadystep.lab.bench.overhead import never_trim_the_heap
from steadystep.lab.bench.overhead_steps import MODELS, adamw, fresh
from steadystep.signals.checksums import SAMPLED_EVERY

ARMS = ("off", "full", "sampled", "off again")
BLOCK = 2 * SAMPLED_EVERY


def guards(model: str) -> list[tuple[Guard, Callable[[], Tensor]]]:
    """One of each kind, in the order of `ARMS`."""
    made: list[tuple[Guard, Callable[[], Tensor]]] = []
    for arm in ARMS:
        setup = fresh(model)
        checks = {"monitoring": {"corruption_checks": arm.split()[0]}}
        made.append((Guard(setup[0], adamw(setup), config=checks), setup[1]))
    return made


def measured(model: str, blocks: int) -> dict[str, list[float]]:
    """Ratios of each arm, one for each block."""
    arms = guards(model)
    ratios: dict[str, list[float]] = {"full": [], "sampled": [], "noise": []}
    for block in range(-2, blocks):
        spent = dict.fromkeys(ARMS, 0.0)
        for number in range(BLOCK):
            for place in range(len(ARMS)):  # each arm follows each other one equally often
                which = (place * (1 if number % 2 else -1) + number // 2) % len(ARMS)
                guard, compute = arms[which]
                before = time.thread_time()
                guard.step(compute)
                spent[ARMS[which]] += time.thread_time() - before
        if block >= 0:  # the first are for memory, caches and baselines
            off = (spent["off"] + spent["off again"]) / 2.0
            ratios["full"].append(spent["full"] / off)
            ratios["sampled"].append(spent["sampled"] / off)
            ratios["noise"].append(spent["off again"] / spent["off"])
    for guard, _ in arms:
        guard.close()
    return ratios


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="GPT, 1M parameters")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--store", type=Path, help="file to add a line of JSON to")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    never_trim_the_heap()
    load = os.getloadavg()[0]
    ratios = measured(args.model, args.blocks)
    print(f"{args.model}, {args.blocks} blocks of {BLOCK} steps, load average {load:.1f}")
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:8} {middle:.4f} ({low:.4f} to {high:.4f})", flush=True)
    if args.store is not None:
        with args.store.open("a") as file:
            file.write(json.dumps({"model": args.model, "load": load, **ratios}) + "\n")


if __name__ == "__main__":
    main()
