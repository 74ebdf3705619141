"""Watched ÷ plain: two copies of one loop take turns in one process, and the ratio of their times is what is printed.

    python benchmarks/watched.py [--rounds 60] [--steps 20] [--profile NAME]

A block of steps of the plain loop, one of the watched loop and one of a second plain loop take turns, in an order that
goes round. Processor time of the thread (`time.thread_time`), so that other programs on the machine count little; the
median over the rounds, with the quartiles. "plain / plain" is the noise floor: the same statistic with the second plain
loop in the place of the watched one. One thread: what Python does beside the kernels is not hidden behind them.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import steadystep


class Block(nn.Module):
    """One block of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of four heads, then the MLP."""
        b, t, w = x.shape
        q, k, v = (part.view(b, t, 4, w // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, w))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


def mlp() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    x, y = torch.randn(256, 128), torch.randint(0, 10, (256,))
    return model, lambda m: F.cross_entropy(m(x), y)


def convolution() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    parts: list[nn.Module] = []
    for i, o in ((3, 16), (16, 16), (16, 32)):
        parts += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
    return model, lambda m: F.cross_entropy(m(x), y)


def transformer() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = nn.Sequential(nn.Embedding(64, 64), Block(64), Block(64), nn.Linear(64, 64))
    x, y = torch.randint(0, 64, (4, 32)), torch.randint(0, 64, (4 * 32,))
    return model, lambda m: F.cross_entropy(m(x).flatten(0, 1), y)


MODELS = {"mlp": mlp, "convolution": convolution, "transformer": transformer}


class Loop:
    """Three lines of everybody's, watched or not."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]], *, watched: bool) -> None:
        torch.manual_seed(0)
        self.model, self.loss = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.watcher = steadystep.watch(self.model, self.optimizer) if watched else None

    def run(self, steps: int) -> float:
        """Processor seconds of so many steps."""
        began = time.thread_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return time.thread_time() - began


def measured(name: str, *, rounds: int, steps: int) -> str:
    loops = {kind: Loop(MODELS[name], watched=kind == "watched") for kind in ("plain", "watched", "other")}
    for loop in loops.values():
        loop.run(40)  # probes at 1, 2, 4, ..., and the first states
    took: dict[str, list[float]] = {kind: [] for kind in loops}
    order = list(loops)
    for _ in range(rounds):
        order = [*order[1:], order[0]]
        for kind in order:
            took[kind].append(loops[kind].run(steps))
    plain = statistics.median(took["plain"]) / steps
    ratios = [watched / other for watched, other in zip(took["watched"], took["plain"], strict=True)]
    floor = [other / plain for other, plain in zip(took["other"], took["plain"], strict=True)]
    more = (statistics.median(ratios) - 1.0) * plain * 1e6
    return (
        f"{name:<12} {plain * 1e3:6.2f} ms/step   watched / plain {spread(ratios)}   {more:+.0f} us/step   "
        f"plain / plain {spread(floor)}"
    )


def spread(ratios: list[float]) -> str:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", choices=sorted(MODELS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.profile:
        loop = Loop(MODELS[asked.profile], watched=True)
        loop.run(256)
        with cProfile.Profile(time.thread_time) as profile:
            loop.run(512)
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    for name in MODELS:
        print(measured(name, rounds=asked.rounds, steps=asked.steps))


if __name__ == "__main__":
    main()
