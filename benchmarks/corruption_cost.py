"""What `monitoring.corruption_checks` costs: the step of a guard with it over that of a guard without.

    python benchmarks/corruption_cost.py                 the GPT of `steadystep bench overhead`, 640 steps of each
    python benchmarks/corruption_cost.py --rounds 1280 --store FILE

Four guards, `off` twice, `sampled` and `full`, take turns step by step on models of their own. Time is that of the
thread on the processor, so that waiting for one does not count; caches and memory are still shared with whatever else
runs. What is compared are steps of the same number: snapshots and checks come at fixed ones. Of every 32nd step the
median difference to the mean of both `off` is taken, and the mean over the 32 is shown, in percent of the median step,
with quartiles over 500 draws of rounds with replacement. `noise` is one `off` against the other. `inside` is the time
in the methods of `Checksums` alone, which leaves out what they do to caches: less for the update, which finds its
tensors there, and more for others.
"""

import argparse
import functools
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadystep import Guard
from steadystep.lab.bench.overhead import never_trim_the_heap
from steadystep.lab.bench.overhead_steps import MODELS, adamw, fresh
from steadystep.signals.checksums import SAMPLED_EVERY, Checksums

ARMS = ("off", "full", "sampled", "off again")
CYCLE = 2 * SAMPLED_EVERY  # steps, in which `sampled` has checked every tensor once
WARM_UP = 2 * CYCLE  # for memory, caches and baselines
DRAWS = 500


def guards(model: str) -> list[tuple[Guard, Callable[[], Tensor]]]:
    """One of each kind, in the order of `ARMS`."""
    made: list[tuple[Guard, Callable[[], Tensor]]] = []
    for arm in ARMS:
        setup = fresh(model)
        checks = {"monitoring": {"corruption_checks": arm.split()[0]}}
        made.append((Guard(setup[0], adamw(setup), config=checks), setup[1]))
    return made


def timed_methods(spent: list[float]) -> None:
    """Let the methods that a step calls add their time to the last of `spent`."""
    for name in ("renew", "verify", "compare", "found"):
        method = getattr(Checksums, name)

        @functools.wraps(method)
        def timed(*args: Any, _method: Callable[..., Any] = method, **more: Any) -> Any:
            before = time.thread_time()
            try:
                return _method(*args, **more)
            finally:
                spent[-1] += time.thread_time() - before

        setattr(Checksums, name, timed)


def measured(model: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step of each arm, and those inside the methods of `Checksums`."""
    arms, spent = guards(model), [0.0]
    timed_methods(spent)
    times: dict[str, list[float]] = {name: [] for arm in ARMS for name in (arm, f"inside {arm}")}
    for number in range(WARM_UP + rounds):
        for place in range(len(ARMS)):  # each arm follows each other one equally often
            which = (place * (1 if number % 2 else -1) + number // 2) % len(ARMS)
            guard, compute = arms[which]
            spent[-1] = 0.0
            before = time.thread_time()
            guard.step(compute)
            times[ARMS[which]].append(time.thread_time() - before)
            times[f"inside {ARMS[which]}"].append(spent[-1])
    for guard, _ in arms:
        guard.close()
    return {name: values[WARM_UP:] for name, values in times.items()}


def shares(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Each step's difference to the step without checks, as a share of the median step without."""
    off = [(one + other) / 2.0 for one, other in zip(times["off"], times["off again"], strict=True)]
    step = statistics.median(off)
    told = {arm: [(a - b) / step for a, b in zip(times[arm], off, strict=True)] for arm in ("full", "sampled")}
    told |= {f"inside {arm}": [value / step for value in times[f"inside {arm}"]] for arm in ("full", "sampled")}
    pairs = zip(times["off again"], times["off"], strict=True)
    return told | {"noise": [(a - b) / step for a, b in pairs]}


def cost(values: list[float]) -> float:
    """The mean, over the steps of a cycle, of the median over cycles."""
    return statistics.fmean(statistics.median(values[first::CYCLE]) for first in range(CYCLE))


def with_quartiles(values: list[float]) -> tuple[float, float, float]:
    """The cost, and quartiles of it over draws of cycles with replacement."""
    chance, cycles = random.Random(0), [values[i : i + CYCLE] for i in range(0, len(values), CYCLE)]
    draws = [cost([*chain(*chance.choices(cycles, k=len(cycles)))]) for _ in range(DRAWS)]
    low, _, high = statistics.quantiles(draws, n=4)
    return cost(values), low, high


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="GPT, 1M parameters")
    parser.add_argument("--rounds", type=int, default=20 * CYCLE, help=f"steps of each arm; whole multiples of {CYCLE}")
    parser.add_argument("--store", type=Path, help="file to add a line of JSON to")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    never_trim_the_heap()
    before = os.getloadavg()[0]
    times = measured(args.model, args.rounds // CYCLE * CYCLE)
    load = max(before, os.getloadavg()[0])
    step, fastest = 1e3 * statistics.median(times["off"]), 1e3 * min(times["off"])
    print(f"{args.model}, {args.rounds} steps of each, {step:.1f} ms (fastest {fastest:.1f}), load average {load:.1f}")
    told = {name: with_quartiles(values) for name, values in shares(times).items()}
    for name, (middle, low, high) in told.items():
        print(f"{name:14} {100 * middle:6.2f} % ({100 * low:.2f} to {100 * high:.2f})", flush=True)
    if args.store is not None:
        with args.store.open("a") as file:
            file.write(json.dumps({"model": args.model, "load": load, "step_ms": step, **told}) + "\n")


if __name__ == "__main__":
    main()
