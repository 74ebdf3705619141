"""Data of the programs: scikit-learn's built-in tables, docstrings of the standard library, and synthetic makers."""

import argparse
import collections
import functools
import math
import pathlib
import random
import statistics
import string
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from sklearn import datasets  # type: ignore[import-untyped]
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Training and held-out examples."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(x: Tensor, y: Tensor, held_out: float = 0.25) -> Split:
    """Cut a fixed random quarter off."""
    order = torch.randperm(len(x), generator=generator(0))
    cut = int(len(x) * (1 - held_out))
    x, y = x[order], y[order]
    return Split(x[:cut], y[:cut], x[cut:], y[cut:])


@functools.cache
def digits() -> Split:
    """1,797 images of 8 x 8, values from 0 to 1, as (N, 1, 8, 8)."""
    raw: Any = datasets.load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    return split(x, torch.tensor(raw.target))


@functools.cache
def table(name: str, *, raw: bool = False) -> Split:
    """One of scikit-learn's tables, with standardized columns unless `raw`; regression targets are standardized."""
    loaded: Any = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    x = torch.tensor(loaded.data, dtype=torch.float32)
    y = torch.tensor(loaded.target)
    if not raw:
        x = (x - x.mean(0)) / x.std(0)
    if y.is_floating_point():
        y = ((y - y.mean()) / y.std()).float()
    return split(x, y)


def friedman(seed: int, count: int = 1200) -> Split:
    """A smooth nonlinear regression of 8 uniform columns with a little noise, targets standardized."""
    g = generator(seed)
    x = torch.rand(count, 8, generator=g) * 2 - 1
    y = torch.sin(math.pi * x[:, 0] * x[:, 1]) + 2 * (x[:, 2] - 0.2) ** 2 + x[:, 3] + 0.5 * x[:, 4]
    y = y + 0.05 * torch.randn(count, generator=g)
    return split(x, (y - y.mean()) / y.std())


@functools.cache
def sentences(seed: int, count: int = 1600, length: int = 16) -> Split:
    """Word ids of short reviews, padded with 0; the label says whether good words outnumber bad ones.

    Ids 1 to 40 are neutral, 41 to 55 good, 56 to 70 bad.
    """
    g = generator(seed)
    y = torch.randint(0, 2, (count,), generator=g)
    words = torch.randint(1, 41, (count, length), generator=g)
    for row in range(count):
        good, bad = (3, 1) if y[row] else (1, 3)
        spots = torch.randperm(length - 8, generator=g)[: good + bad]
        words[row, spots[:good]] = torch.randint(41, 56, (good,), generator=g)
        words[row, spots[good:]] = torch.randint(56, 71, (bad,), generator=g)
        words[row, int(torch.randint(length - 8, length - 1, (1,), generator=g)) :] = 0
    return split(words, y)


SYLLABLES = (("ka", "mi", "to", "ra", "shi"), ("ov", "ski", "dra", "ya", "pet"), ("eau", "lle", "que", "bon", "ier"))


@functools.cache
def names(seed: int, count: int = 1500, length: int = 10) -> Split:
    """Surnames of three made-up languages as letter ids, padded with 0."""
    rng = random.Random(seed)
    x, y = torch.zeros(count, length, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for row in range(count):
        y[row] = language = rng.randrange(3)
        word = "".join(rng.choice(SYLLABLES[language if rng.random() < 0.8 else rng.randrange(3)]) for _ in range(3))
        for column, letter in enumerate(word[:length]):
            x[row, column] = string.ascii_lowercase.index(letter) + 1
    return split(x, y)


LETTERS = string.ascii_lowercase + " .,()_"


@functools.cache
def prose(length: int = 24) -> Split:
    """Docstrings of the standard library as letter ids: windows, and the letters that follow them."""
    modules = (argparse, collections, functools, pathlib, random, statistics, textwrap, string)
    documented = [member for module in modules for member in (module, *_members(module))]
    text = " ".join(dict.fromkeys(str(member.__doc__) for member in documented))
    kept = [LETTERS.index(letter) for letter in " ".join(text.lower().split()) if letter in LETTERS]
    ids = torch.tensor(kept[:60_000])
    windows = ids.unfold(0, length + 1, length + 1)
    return split(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def _members(module: Any) -> list[Any]:
    return [getattr(module, name) for name in sorted(dir(module)) if not name.startswith("_")]


def recall(seed: int, length: int, count: int = 1200, symbols: int = 4) -> Split:
    """A one-hot symbol at the first position, then noise; the label is the symbol. Shape (N, length, symbols)."""
    g = generator(seed)
    y = torch.randint(0, symbols, (count,), generator=g)
    x = 0.2 * torch.randn(count, length, symbols, generator=g)
    x[torch.arange(count), 0, y] += 2
    return split(x, y)


def waves(seed: int, count: int = 900, length: int = 128) -> Split:
    """Four kinds of sounds within [-1, 1] as (N, length): low tone, high tone, rising tone and clicks, in noise."""
    g = generator(seed)
    y = torch.randint(0, 4, (count,), generator=g)
    t = torch.linspace(0, 1, length).expand(count, length)
    phase = 6.28 * torch.rand(count, 1, generator=g)
    clicks = (torch.rand(count, length, generator=g) < 0.06).float() * 2 - 0.12
    kinds = torch.stack([torch.sin(25 * t + phase), torch.sin(90 * t + phase), torch.sin(70 * t * t + phase), clicks])
    x = kinds[y, torch.arange(count)] * 0.5 + 0.1 * torch.randn(count, length, generator=g)
    return split(x.clamp(-1, 1), y)


def series(seed: int, count: int = 1500, length: int = 24) -> Split:
    """Windows of a noisy sum of three sine waves, and the value that follows each."""
    g = generator(seed)
    t = torch.arange(count + length, dtype=torch.float32)
    wave = torch.sin(t / 3) + 0.6 * torch.sin(t / 7.3 + 1) + 0.4 * torch.sin(t / 1.7)
    wave = wave + 0.1 * torch.randn(len(t), generator=g)
    windows = wave.unfold(0, length + 1, 1)
    return split(windows[:, :-1].contiguous(), windows[:, -1].contiguous())


def discs(seed: int, count: int = 500, side: int = 16) -> Split:
    """Noisy images with one bright disc, and its mask; about a tenth of the pixels is disc."""
    g = generator(seed)
    axis = torch.arange(side, dtype=torch.float32)
    center = torch.rand(count, 2, 1, 1, generator=g) * (side - 6) + 3
    far = (axis.view(1, side, 1) - center[:, 0]) ** 2 + (axis.view(1, 1, side) - center[:, 1]) ** 2
    y = (far < 8).float().unsqueeze(1)
    return split(y + 0.4 * torch.randn(y.shape, generator=g), y)


def ring(seed: int, count: int = 2048) -> Tensor:
    """Points around eight centers on a circle of radius 2."""
    g = generator(seed)
    angle = torch.randint(0, 8, (count,), generator=g) * (math.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.1 * torch.randn(count, 2, generator=g)


def blocks(seed: int, count: int = 240) -> tuple[Tensor, Tensor, Tensor]:
    """A graph of three communities: adjacency without self-loops, weak features (N, 8) and labels."""
    g = generator(seed)
    y = torch.randint(0, 3, (count,), generator=g)
    chance = torch.where(y.view(-1, 1) == y.view(1, -1), 0.12, 0.02)
    upper = torch.triu((torch.rand(count, count, generator=g) < chance).float(), diagonal=1)
    x = torch.randn(count, 8, generator=g)
    x[torch.arange(count), y] += 1
    return upper + upper.T, x, y


def ratings(seed: int, users: int = 60, items: int = 50) -> Split:
    """Pairs (user, item) and whether the user likes the item, from a matrix of rank 3."""
    g = generator(seed)
    likes = torch.randn(users, 3, generator=g) @ torch.randn(3, items, generator=g) > 0
    pairs = torch.cartesian_prod(torch.arange(users), torch.arange(items))
    return split(pairs, likes.flatten().float())
