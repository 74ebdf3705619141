"""What a guard costs: guarded step ÷ plain step with clip_grad_norm_ and loss.item(), interleaved in one process.

Blocks of plain, guarded and plain-again steps alternate; each ratio is the median over blocks of (guarded block ÷ mean
of its two plain neighbours). The noise floor is the same statistic with a third plain loop in the guarded place.

Heap trimming is switched off (glibc): without that, whichever loop was built last lies on top of the heap, gives its
gradients back to the system after every step and takes thousands of page faults to get them again. A plain loop built
last is then 1.3 to 1.8 times slower than the same loop built first. Run:

    python benchmarks/overhead.py            # all four models
    python benchmarks/overhead.py --json     # for a program
"""

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import steadystep
from steadystep.lab.gpt import GPT, GPTSize

Step = Callable[[], object]
Setup = tuple[nn.Module, Callable[[], Tensor]]


def mlp(width: int, depth: int = 3, batch_size: int = 32) -> Setup:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    x = torch.randn(batch_size, width)
    return model, lambda: model(x).square().mean()


def gpt() -> Setup:
    model = GPT(GPTSize(d_model=128, num_layers=5, num_heads=4, context=64))
    text = torch.randint(256, (8, 65))
    return model, lambda: model.loss(text)


def many_tensors(count: int = 1000) -> Setup:
    model = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(count))
    return model, lambda: torch.stack(list(model)).square().mean()


MODELS: dict[str, Callable[[], Setup]] = {
    "MLP, width 64": lambda: mlp(64),
    "MLP, width 1024": lambda: mlp(1024),
    "GPT, 1M parameters": gpt,
    "1,000 small tensors": many_tensors,
}


def plain_step(setup: Setup) -> Step:
    model, compute = setup
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parameters = list(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = compute()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def guarded_step(setup: Setup, run_dir: Path) -> Step:
    model, compute = setup
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    guard = steadystep.Guard(model, optimizer, run_dir=run_dir)
    return lambda: guard.step(compute).loss


def seconds(step: Step, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return time.perf_counter() - started


def ratios(plain: Step, candidate: Step, plain_again: Step, *, blocks: int, repeats: int) -> list[float]:
    result = []
    for _ in range(blocks):
        before = seconds(plain, repeats)
        middle = seconds(candidate, repeats)
        after = seconds(plain_again, repeats)
        result.append(2 * middle / (before + after))
    return result


def measure(make: Callable[[], Setup], run_dir: Path, *, blocks: int) -> dict[str, float]:
    def fresh() -> Setup:
        torch.manual_seed(0)
        return make()

    first, second, third = (plain_step(fresh()) for _ in range(3))
    guarded = guarded_step(fresh(), run_dir)
    for step in (first, second, third, guarded):
        seconds(step, 60)  # alone: the third copy of the state, at step 40, sets how often one is taken
    repeats = max(2, int(0.05 / (seconds(first, 20) / 20)))
    found = ratios(first, guarded, second, blocks=blocks, repeats=repeats)
    noise = ratios(first, third, second, blocks=blocks, repeats=repeats)
    quartiles = statistics.quantiles(found, n=4)
    return {
        "ratio": statistics.median(found),
        "low": quartiles[0],
        "high": quartiles[2],
        "noise": statistics.median(noise),
        "plain_us": seconds(first, repeats) / repeats * 1e6,
    }


def never_trim_the_heap() -> None:
    """M_TRIM_THRESHOLD (-1) and M_MMAP_THRESHOLD (-3) to 1 GiB; does nothing where the C library has no mallopt."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)
        libc.mallopt(-3, 1 << 30)
    except (OSError, AttributeError):
        print("no mallopt here: ratios of large models depend on the order the loops were built in", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=60, help="alternations per model (default 60)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1: less noise)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    never_trim_the_heap()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, make) in enumerate(MODELS.items()):
            results[name] = measure(make, Path(folder) / str(number), blocks=options.blocks)
            if not options.json:
                r = results[name]
                print(
                    f"{name:<20} guarded/plain {r['ratio']:.3f} (quartiles {r['low']:.3f} to {r['high']:.3f}), "
                    f"plain/plain {r['noise']:.3f}, plain step {r['plain_us']:,.0f} us",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"torch": torch.__version__, "threads": options.threads, "results": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
