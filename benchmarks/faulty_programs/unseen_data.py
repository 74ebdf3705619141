"""Data of the unseen programs, all synthetic: images, sentences, tables, series, sounds, graphs and ratings."""

import functools
import math

import torch
from torch import Tensor

from .data import Split, generator, split


def arrows(seed: int, count: int = 900, side: int = 9) -> Split:
    """Arrows that point left, right, up or down, in noise, as (N, 1, side, side)."""
    g = generator(seed)
    y = torch.randint(0, 4, (count,), generator=g)
    left = torch.zeros(side, side)
    left[side // 2, 1:-1] = 1
    for k in range(1, 4):
        left[side // 2 - k, 1 + k] = left[side // 2 + k, 1 + k] = 1
    kinds = torch.stack([left, left.flip(1), left.T, left.T.flip(0)])
    x = kinds[y] + 0.3 * torch.randn(count, side, side, generator=g)
    return split(x.unsqueeze(1), y)


def stripes(seed: int, count: int = 800, side: int = 12) -> Split:
    """Colored stripes of four orientations as (N, 3, side, side), values from 0 to 1."""
    g = generator(seed)
    y = torch.randint(0, 4, (count,), generator=g)
    axis = torch.arange(side, dtype=torch.float32)
    angle = y * math.pi / 4
    along = angle.cos().view(-1, 1, 1) * axis.view(1, side, 1) + angle.sin().view(-1, 1, 1) * axis.view(1, 1, side)
    speed = 0.9 + 0.6 * torch.rand(count, 1, 1, generator=g)
    wave = torch.sin(speed * along + 6.28 * torch.rand(count, 1, 1, generator=g)).unsqueeze(1)
    color = torch.rand(count, 3, 1, 1, generator=g)
    x = 0.5 + 0.35 * wave * color + 0.05 * torch.randn(count, 3, side, side, generator=g)
    return split(x.clamp(0, 1), y)


def tags(seed: int, count: int = 700, length: int = 12, words: int = 40) -> Split:
    """Word ids from 1 up and a tag per word, which depends on the word and on the one before it; both (N, length)."""
    g = generator(seed)
    kind = torch.arange(words + 1) % 4
    x = torch.randint(1, words + 1, (count, length), generator=g)
    before = torch.cat([torch.zeros(count, 1, dtype=torch.long), kind[x[:, :-1]]], dim=1)
    return split(x, (kind[x] + 2 * (before // 2)) % 4)


def topics(seed: int, count: int = 900, length: int = 14, words: int = 60) -> Split:
    """Word ids from 2 up (0 is padding, 1 unknown) of five topics, each with words it likes; lengths vary."""
    g = generator(seed)
    y = torch.randint(0, 5, (count,), generator=g)
    liked = 2 + torch.randint(0, words // 5, (count, length), generator=g) * 5 + y.view(-1, 1)
    x = torch.where(
        torch.rand(count, length, generator=g) < 0.45, liked, torch.randint(2, words, (count, length), generator=g)
    )
    lengths = torch.randint(length // 2, length + 1, (count, 1), generator=g)
    return split(x * (torch.arange(length) < lengths), y)


def marked(seed: int, count: int = 1200, length: int = 10) -> Split:
    """Sequences of five one-hot symbols and a mark at one position, (N, length, 6); the label is the symbol there."""
    g = generator(seed)
    symbols = torch.randint(0, 5, (count, length), generator=g)
    spot = torch.randint(0, length, (count,), generator=g)
    rows = torch.arange(count)
    x = torch.cat([torch.eye(5)[symbols], torch.zeros(count, length, 1)], dim=-1)
    x[rows, spot, 5] = 1
    return split(x, symbols[rows, spot])


def adding(seed: int, length: int, count: int = 1500) -> Split:
    """Numbers with two of them marked, as (N, length, 2), and the sum of the marked ones less 1."""
    g = generator(seed)
    values = torch.rand(count, length, generator=g)
    marks = torch.zeros(count, length)
    first = torch.randint(0, length // 2, (count,), generator=g)
    second = torch.randint(length // 2, length, (count,), generator=g)
    rows = torch.arange(count)
    marks[rows, first] = marks[rows, second] = 1
    return split(torch.stack([values, marks], dim=-1), (values * marks).sum(1) - 1)


def moons(seed: int, count: int = 900) -> Split:
    """Two half circles that interlock, and four columns of noise."""
    g = generator(seed)
    y = torch.randint(0, 2, (count,), generator=g)
    angle = math.pi * torch.rand(count, generator=g)
    x1 = torch.where(y == 0, angle.cos(), 1 - angle.cos())
    x2 = torch.where(y == 0, angle.sin(), 0.5 - angle.sin())
    x = torch.stack([x1 - 0.5, x2 - 0.25], dim=1) * 1.5 + 0.15 * torch.randn(count, 2, generator=g)
    return split(torch.cat([x, 0.3 * torch.randn(count, 4, generator=g)], dim=1), y)


def surface(seed: int, count: int = 1200, noise: float = 0.05) -> Split:
    """A bumpy function of 5 normal columns, standardized."""
    g = generator(seed)
    x = torch.randn(count, 5, generator=g)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3].abs()
    return split(x, (y - y.mean()) / y.std() + noise * torch.randn(count, generator=g))


def counts(seed: int, count: int = 1200) -> Split:
    """Numbers of events whose rate is the exponential of a sum of 6 columns."""
    g = generator(seed)
    x = torch.randn(count, 6, generator=g)
    rate = torch.exp(0.8 * x[:, 0] - 0.5 * x[:, 1] + 0.3 * x[:, 2] * x[:, 3] + 0.5)
    return split(x, torch.poisson(rate.clamp(max=30), generator=g))


@functools.cache
def load(seed: int, window: int = 24, count: int = 1500) -> Split:
    """Windows of an hourly electric load with daily and weekly cycles, standardized, and the next hour."""
    g = generator(seed)
    t = torch.arange(count + window, dtype=torch.float32)
    value = torch.sin(t * 2 * math.pi / 24) + 0.5 * torch.sin(t * 2 * math.pi / 12 + 1)
    value = value * (1 + 0.3 * torch.cos(t * 2 * math.pi / 168)) + 0.1 * torch.randn(len(t), generator=g)
    windows = ((value - value.mean()) / value.std()).unfold(0, window + 1, 1)
    return split(windows[:, :-1].contiguous(), windows[:, -1].contiguous())


def tones(seed: int, count: int = 800, length: int = 96) -> Split:
    """Three harmonics of one of six pitches in noise, within [-1, 1], as (N, length)."""
    g = generator(seed)
    y = torch.randint(0, 6, (count,), generator=g)
    t = torch.linspace(0, 1, length).view(1, -1)
    pitch = (18 * 1.26 ** y.float()).view(-1, 1)
    phase = 6.28 * torch.rand(count, 3, 1, generator=g)
    x = sum((0.3 / k * torch.sin(k * pitch * t + phase[:, k - 1]) for k in (1, 2, 3)), torch.zeros(count, length))
    return split((x + 0.08 * torch.randn(count, length, generator=g)).clamp(-1, 1), y)


def communities(seed: int, count: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """A graph of four groups: normalized adjacency with self-loops, features (N, 6) that say little, and labels."""
    g = generator(seed)
    y = torch.arange(count) % 4
    chance = torch.where(y.view(-1, 1) == y.view(1, -1), 0.2, 0.02)
    upper = torch.triu((torch.rand(count, count, generator=g) < chance).float(), diagonal=1)
    full = upper + upper.T + torch.eye(count)
    root = full.sum(1).rsqrt()
    x = torch.randn(count, 6, generator=g)
    x[torch.arange(count), y] += 1
    return root.view(-1, 1) * full * root.view(1, -1), x, y


def molecules(seed: int, count: int = 500, size: int = 10) -> tuple[Split, Split]:
    """Random graphs as (adjacency, label) and (features, label); the label says whether marked nodes form a triangle.

    Both splits are cut in the same way. Adjacency is (N, size, size), features (N, size, 3).
    """
    g = generator(seed)
    y = torch.arange(count) % 2
    upper = torch.triu((torch.rand(count, size, size, generator=g) < 0.15).float(), diagonal=1)
    x = torch.zeros(count, size, 3)
    x[:, :, 0] = 1
    x[:, :3, 1] = 1
    upper[:, 0, 1] = upper[:, 0, 2] = upper[:, 1, 2] = y.float()
    x[:, :, 2] = torch.rand(count, size, generator=g)
    return split(upper + upper.transpose(1, 2), y), split(x, y)


def stars(seed: int, users: int = 50, items: int = 40) -> Split:
    """Pairs (user, item) and a rating from 1 to 5 of a matrix of rank 2."""
    g = generator(seed)
    taste = torch.randn(users, 2, generator=g) @ torch.randn(2, items, generator=g)
    rating = (3 + 1.2 * taste + 0.2 * torch.randn(users, items, generator=g)).clamp(1, 5)
    return split(torch.cartesian_prod(torch.arange(users), torch.arange(items)), rating.flatten())


def crescents(seed: int, count: int = 2048) -> Tensor:
    """Points of two half circles in the plane, standardized."""
    g = generator(seed)
    upper = torch.rand(count, generator=g) < 0.5
    angle = math.pi * torch.rand(count, generator=g)
    x1 = torch.where(upper, angle.cos(), 1 - angle.cos())
    x2 = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    x = torch.stack([x1, x2], dim=1) + 0.06 * torch.randn(count, 2, generator=g)
    return (x - x.mean(0)) / x.std(0)
