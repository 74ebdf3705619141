"""Flipped bits between two updates: how many are seen before the next one, and what the run ends with.

    python -m benchmarks.bit_flips                    10,000 flips over weights, optimizer state and buffers, all bits
    python -m benchmarks.bit_flips --healthy 200000   healthy steps of loops that change their weights on purpose
    python -m benchmarks.bit_flips --store FILE       what is in FILE is not run again: a line of JSON for each run

Every fourth step of a run gets one flip, at a random bit of a random element of a random tensor: half of them between
two steps, half inside the closure, after the forward pass. A run is compared, bit for bit, with the same run without.
"""

import argparse
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from steadystep import Guard

STEPS, EVERY = 200, 4
FULL = {"monitoring": {"corruption_checks": "full"}}
TWICE = {"monitoring": {"corruption_checks": "full", "recompute_every": 50}}


def network(seed: int) -> nn.Sequential:
    """With tensors that are copied and tensors that are added up, BatchNorm and dropout."""
    torch.manual_seed(seed)
    middle = [nn.Linear(96, 130), nn.LayerNorm(130), nn.GELU(), nn.Dropout(0.1), nn.Linear(130, 130), nn.Linear(130, 3)]
    return nn.Sequential(nn.Linear(10, 96), nn.BatchNorm1d(96), nn.ReLU(), *middle)


def optimizers(kind: str, model: nn.Module) -> list[Optimizer]:
    """One, or Muon with AdamW for what is no matrix."""
    if kind == "Muon":
        matrices = [p for p in model.parameters() if p.dim() == 2]
        return [Muon(matrices, lr=1e-3), AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-3)]
    return [AdamW(model.parameters(), lr=1e-3) if kind == "AdamW" else SGD(model.parameters(), lr=0.05, momentum=0.9)]


def held(model: nn.Module, each: list[Optimizer], *, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """What may be hit. Whole numbers are left out: one more in a counter is no damage that anybody could tell."""
    yield from (("weight", p) for p in model.parameters())
    states = (value for one in each for state in one.state.values() for value in state.values())
    yield from (("state", value) for value in states if isinstance(value, Tensor))
    if buffers:  # the forward pass writes them, so they are compared before it
        yield from (("buffer", b) for b in model.buffers() if b.is_floating_point())


def run(kind: str, seed: int, *, inside: bool, flips: bool) -> tuple[bytes, Counter[str], Counter[str]]:
    """All bits at the end, flips made and flips seen at the step they were made in, by what was hit."""
    model = network(seed)
    each = optimizers(kind, model)
    guard = Guard(model, each, config=FULL)
    chance, data = random.Random(seed), torch.Generator().manual_seed(seed)
    made: Counter[str] = Counter()
    seen: Counter[str] = Counter()

    def hit() -> str:
        what, tensor = chance.choice(list(held(model, each, buffers=not inside)))
        memory = tensor.data.view(-1).view(torch.uint8)
        memory[chance.randrange(len(memory))] ^= 1 << chance.randrange(8)
        return what

    for step in range(STEPS):
        x = torch.randn(16, 10, generator=data)
        y = (x.sum(1) > 0).long()
        todo = [flips and step % EVERY == EVERY - 1]
        what = hit() if todo[0] and not inside else ""

        def closure(x: Tensor = x, y: Tensor = y, todo: list[bool] = todo) -> Tensor:
            nonlocal what
            loss = nn.functional.cross_entropy(model(x), y)
            if inside and todo and todo.pop():
                what = hit()
            return loss

        outcome = guard.step(closure)
        if what:
            made[what] += 1
            seen[what] += outcome.signals is not None and len(outcome.signals.bit_flips) == 1
    guard.close()
    state = [*model.parameters(), *model.buffers(), *(t for _, t in held(model, each, buffers=False))]
    return b"".join(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in state), made, seen


def stored(store: Path | None, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, or gave when it was run before."""
    lines = store.read_text().splitlines() if store is not None and store.exists() else []
    known: dict[str, dict[str, Any]] = {line["key"]: line for line in map(json.loads, lines)}
    if key not in known:
        known[key] = {"key": key, **make()}
        if store is not None:
            with store.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
    return known[key]


def pair(kind: str, seed: int, *, inside: bool) -> dict[str, Any]:
    """One run with flips, and whether it ends with the bits of the run without."""
    clean, _, _ = run(kind, seed, inside=inside, flips=False)
    bits, made, seen = run(kind, seed, inside=inside, flips=True)
    return {"made": made, "seen": seen, "same": bits == clean}


def flipped(count: int, store: Path | None) -> None:
    """Print seen of made, and runs that end with the bits of the run without flips."""
    print(f"{'optimizer':10} {'when':8} {'flips':>6} {'seen':>6} {'runs':>5} {'same bits':>9}")
    per_cell = -(-count // (6 * (STEPS // EVERY)))
    for kind in ("AdamW", "SGD", "Muon"):
        for inside in (False, True):
            made: Counter[str] = Counter()
            seen: Counter[str] = Counter()
            same = 0
            for seed in range(per_cell):
                make = partial(pair, kind, seed, inside=inside)
                one = stored(store, f"{kind} {'inside' if inside else 'between'} {seed}", make)
                made, seen, same = made + Counter(one["made"]), seen + Counter(one["seen"]), same + one["same"]
            when = "inside" if inside else "between"
            print(
                f"{kind:10} {when:8} {made.total():6} {seen.total():6} {per_cell:5} {same:9}  {dict(made)}", flush=True
            )


def healthy(steps: int, store: Path | None) -> None:
    """Print what is found in loops that swap averages in and out, prune, reset, load, clamp and use schedulers."""
    total: Counter[str] = Counter()
    for seed in range(-(-steps // 2000)):
        one = stored(store, f"healthy {seed}", partial(healthy_run, seed))
        total += Counter({name: one[name] for name in ("steps", "found", "refused")})
        print(f"{total['steps']} steps, {total['found']} with a finding, {total['refused']} refused", flush=True)


def healthy_run(seed: int) -> dict[str, Any]:
    """Two thousand steps."""
    found = refused = total = 0
    model = network(seed)
    each = optimizers(("AdamW", "SGD", "Muon")[seed % 3], model)
    guard = Guard(model, each, config=TWICE)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 2000) for one in each]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))  # type: ignore[no-untyped-call]
    data = torch.Generator().manual_seed(seed)
    for step in range(2000):
        x = torch.randn(16, 10, generator=data)
        y = (x.sum(1) > 0).long()

        def closure(x: Tensor = x, y: Tensor = y, model: nn.Module = model) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        outcome = guard.step(closure)
        signals = outcome.signals
        found += signals is not None and bool(signals.bit_flips or signals.miscomputations)
        refused += not outcome.stepped
        total += 1
        for schedule in schedules:
            schedule.step()
        average.update_parameters(model)
        edit(model, average, step, kind=seed % 6)
    guard.close()
    return {"steps": total, "found": found, "refused": refused}


@torch.no_grad()
def edit(model: nn.Sequential, average: nn.Module, step: int, *, kind: int) -> None:
    """What loops do to their weights between two steps."""
    last = model[-1]
    assert isinstance(last, nn.Linear)
    if kind == 0 and step % 100 == 50:  # weights of the average, for an evaluation
        mine = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average.module.state_dict())  # type: ignore[union-attr]
        model.load_state_dict(mine)
    elif kind == 1 and step % 200 == 100:
        last.reset_parameters()
    elif kind == 2:  # max-norm
        last.weight.data.renorm_(2, 0, 3.0)
    elif kind == 3 and step % 50 == 0:  # pruning
        last.weight.data[last.weight.abs() < 0.01] = 0.0
    elif kind == 4 and step % 300 == 150:
        model.load_state_dict(model.state_dict())
        last.bias.data.zero_()
    elif kind == 5:  # another pass moves the statistics of BatchNorm
        model(torch.randn(8, 10))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--healthy", type=int, default=0, metavar="STEPS")
    parser.add_argument("--store", type=Path, help="file of finished runs")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    healthy(args.healthy, args.store) if args.healthy else flipped(args.flips, args.store)


if __name__ == "__main__":
    main()
