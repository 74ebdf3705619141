"""What clipping costs: `clip_global_norm_` ÷ `torch.nn.utils.clip_grad_norm_`, interleaved in one process.

Blocks of torch's, ours and torch's again alternate; a ratio is the median over blocks of (our block ÷ mean of its two
neighbours). The noise floor is the same statistic with torch's function in our place. In the rows "fires" every call
clips: the limit sinks a little from call to call. In the others none does; torch multiplies by 1 there, we do not.

Ours returns floats and so waits for the device once. Torch's returns a tensor: a loop that logs the norm or looks
whether it is finite pays for `.item()` on top. Both comparisons are shown; on a CPU they hardly differ. Heap trimming
is off for the reason given in overhead.py. Run:

    python benchmarks/clip.py                     # 50 and 1,000 tensors of 16 and of 4,096 elements
    python benchmarks/clip.py --dtype bfloat16    # the same in half precision
    python benchmarks/clip.py --json              # for a program
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from steadystep.clip import clip_global_norm_
from steadystep.lab.bench.overhead import never_trim_the_heap

Clip = Callable[[list[nn.Parameter], float], object]

CLIPS: dict[str, Clip] = {
    "ours": lambda params, limit: clip_global_norm_(params, max_norm=limit),
    "torch": lambda params, limit: nn.utils.clip_grad_norm_(params, limit),
    "torch with .item()": lambda params, limit: nn.utils.clip_grad_norm_(params, limit).item(),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """Parameters with gradients that are put back before every block."""

    params: list[nn.Parameter]
    gradients: list[torch.Tensor]
    limits: list[float]

    def seconds(self, clip: Clip) -> float:
        """One block: all limits, one call each."""
        for param, gradient in zip(self.params, self.gradients, strict=True):
            assert param.grad is not None
            param.grad.copy_(gradient)
        started = time.perf_counter()
        for limit in self.limits:
            clip(self.params, limit)
        return time.perf_counter() - started


def bench(num_tensors: int, num_elements: int, dtype: torch.dtype, *, fires: bool, repeats: int) -> Bench:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(num_elements, dtype=dtype)) for _ in range(num_tensors)]
    gradients = [torch.randn(num_elements).to(dtype) for _ in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    norm = nn.utils.get_total_norm(gradients).item()
    sink = 0.999 if dtype == torch.float32 else 0.98  # more than rounding hides
    limits = [norm * sink ** (n + 1) if fires else norm * 2 for n in range(repeats)]
    return Bench(params, gradients, limits)


def ratios(setting: Bench, candidate: Clip, standard: Clip, blocks: int) -> list[float]:
    result = []
    for _ in range(blocks):
        before = setting.seconds(standard)
        middle = setting.seconds(candidate)
        after = setting.seconds(standard)
        result.append(2 * middle / (before + after))
    return result


def measure(num_tensors: int, num_elements: int, dtype: torch.dtype, *, fires: bool, blocks: int) -> dict[str, float]:
    repeats = max(5, 5_000 // num_tensors)
    setting = bench(num_tensors, num_elements, dtype, fires=fires, repeats=repeats)
    for clip in CLIPS.values():
        setting.seconds(clip)
    ours, torchs, with_item = CLIPS.values()
    found = ratios(setting, ours, torchs, blocks)
    quartiles = statistics.quantiles(found, n=4)
    return {
        "ratio": statistics.median(found),
        "low": quartiles[0],
        "high": quartiles[2],
        "ratio_with_item": statistics.median(ratios(setting, ours, with_item, blocks)),
        "noise": statistics.median(ratios(setting, torchs, torchs, blocks)),
        "torch_us": setting.seconds(torchs) / repeats * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=40, help="alternations per row (default 40)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1: less noise)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    torch.set_num_threads(options.threads)
    never_trim_the_heap()
    results = {}
    for num_tensors in (50, 1000):
        for num_elements in (16, 4096):
            for fires in (True, False):
                name = f"{num_tensors:,} x {num_elements:,}, {'fires' if fires else 'does not fire'}"
                r = results[name] = measure(num_tensors, num_elements, dtype, fires=fires, blocks=options.blocks)
                if not options.json:
                    print(
                        f"{name:<30} ours/torch {r['ratio']:.3f} (quartiles {r['low']:.3f} to {r['high']:.3f}), "
                        f"ours/torch with .item() {r['ratio_with_item']:.3f}, torch/torch {r['noise']:.3f}, "
                        f"torch {r['torch_us']:,.0f} us",
                        flush=True,
                    )
    if options.json:
        facts = {"torch": torch.__version__, "threads": options.threads, "dtype": options.dtype}
        print(json.dumps({**facts, "results": results}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
