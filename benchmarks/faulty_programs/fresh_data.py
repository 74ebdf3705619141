"""Data of the fresh programs: scenes with boxes, scans, translations, molecules, trajectories."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import Split, generator, split


@dataclass(frozen=True)
class Scenes:
    """Images with one object: its class, and its box as center and size from 0 to 1."""

    image: Tensor
    kind: Tensor
    box: Tensor

    def part(self, rows: slice) -> "Scenes":
        """Return some of the rows."""
        return Scenes(self.image[rows], self.kind[rows], self.box[rows])


def scenes(seed: int, count: int = 800, side: int = 16) -> Scenes:
    """Filled squares, hollow squares and crosses of 5 to 8 pixels in noise, as (N, 1, side, side)."""
    g = generator(seed)
    kind = torch.randint(0, 3, (count,), generator=g)
    size = torch.randint(5, 9, (count,), generator=g)
    left = (torch.rand(count, 2, generator=g) * (side - size + 1).view(-1, 1)).long()
    image = 0.15 * torch.randn(count, 1, side, side, generator=g)
    for row in range(count):
        y, x, s = int(left[row, 0]), int(left[row, 1]), int(size[row])
        patch = torch.ones(s, s)
        if kind[row] == 1:
            patch[1:-1, 1:-1] = 0
        elif kind[row] == 2:
            patch = torch.zeros(s, s)
            patch[s // 2], patch[:, s // 2] = 1, 1
        image[row, 0, y : y + s, x : x + s] += patch
    middle = (left + size.view(-1, 1) / 2) / side
    return Scenes(image, kind, torch.cat([middle, (size / side).view(-1, 1).expand(-1, 2)], dim=1))


def scans(seed: int, count: int = 400, side: int = 16) -> Split:
    """Slices with a bright disc (1) and a dark square (2) on grey (0); the target is a class per pixel."""
    g = generator(seed)
    axis = torch.arange(side, dtype=torch.float32)
    spot = torch.rand(count, 2, 2, 1, 1, generator=g) * (side - 6) + 3
    rows, columns = axis.view(1, side, 1), axis.view(1, 1, side)
    disc = (rows - spot[:, 0, 0]) ** 2 + (columns - spot[:, 0, 1]) ** 2 < 8
    square = ((rows - spot[:, 1, 0]).abs() < 2.5) & ((columns - spot[:, 1, 1]).abs() < 2.5)
    y = torch.zeros(count, side, side, dtype=torch.long).masked_fill(disc, 1).masked_fill(square, 2)
    level = torch.tensor([0.0, 1.0, -1.0])[y]
    return split((level + 0.4 * torch.randn(level.shape, generator=g)).unsqueeze(1), y)


def topics(seed: int, count: int = 1200, length: int = 12, kinds: int = 4) -> Split:
    """Word ids of short notes; each topic has 10 words of its own, and half of a note is common words."""
    g = generator(seed)
    y = torch.randint(0, kinds, (count,), generator=g)
    own = torch.randint(0, 10, (count, length), generator=g) + (20 + 10 * y).view(-1, 1)
    common = torch.randint(1, 20, (count, length), generator=g)
    return split(torch.where(torch.rand(count, length, generator=g) < 0.4, own, common), y)


def translations(seed: int, count: int = 1500, length: int = 7, words: int = 12) -> Split:
    """Sentences of 3 to 7 words and their translation: other words in reversed order. 0 is padding, 1 starts.

    Words are 2 to 13; the target has one more position than the source, because it begins with 1.
    """
    g = generator(seed)
    dictionary = torch.randperm(words, generator=g) + 2
    size = torch.randint(3, length + 1, (count,), generator=g)
    x = torch.randint(2, 2 + words, (count, length), generator=g)
    y = torch.zeros(count, length + 1, dtype=torch.long)
    y[:, 0] = 1
    for row in range(count):
        n = int(size[row])
        x[row, n:] = 0
        y[row, 1 : n + 1] = dictionary[x[row, :n].flip(0) - 2]
    return split(x, y)


def molecules(seed: int, count: int = 400, atoms: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Small graphs: adjacency (N, 8, 8), atom types one-hot (N, 8, 4), and a property of atoms and their neighbors."""
    g = generator(seed)
    upper = torch.triu((torch.rand(count, atoms, atoms, generator=g) < 0.35).float(), diagonal=1)
    edges = upper + upper.transpose(1, 2)
    kind = torch.randint(0, 4, (count, atoms), generator=g)
    x = torch.nn.functional.one_hot(kind, 4).float()
    charge = x @ torch.tensor([1.0, -0.5, 0.3, -1.0])
    y = charge.sum(1) + 0.7 * ((edges @ charge.unsqueeze(-1)).squeeze(-1) * charge).sum(1)
    return edges, x, (y - y.mean()) / y.std()


def swings(seed: int, count: int = 300, length: int = 20) -> Tensor:
    """Trajectories (N, length, 2) of a damped pendulum from random starts."""
    g = generator(seed)
    state = torch.rand(count, 2, generator=g) * 2 - 1
    states = [state]
    for _ in range(length - 1):
        angle, speed = state[:, 0], state[:, 1]
        state = torch.stack([angle + 0.3 * speed, speed - 0.3 * torch.sin(angle) - 0.03 * speed], dim=1)
        states.append(state)
    return torch.stack(states, dim=1)


def speakers(seed: int, count: int = 900, width: int = 24) -> Split:
    """Spectra of six speakers: the place of three formants tells who it is, the loudness does not."""
    g = generator(seed)
    y = torch.randint(0, 6, (count,), generator=g)
    formants = torch.rand(6, 3, generator=generator(9)) * (width - 4) + 2
    bins = torch.arange(width, dtype=torch.float32).view(1, 1, -1)
    place = formants[y].unsqueeze(-1) + 0.5 * torch.randn(count, 3, 1, generator=g)
    x = torch.exp(-((bins - place) ** 2) / 3).sum(1) * (0.5 + torch.rand(count, 1, generator=g))
    return split(x + 0.15 * torch.randn(x.shape, generator=g), y)


def tides(seed: int, count: int = 1400, length: int = 16, first: float = 1.6) -> Split:
    """Windows of a noisy second-order recurrence, and the value that follows each."""
    g = generator(seed)
    noise = torch.randn(count + length + 1, generator=g)
    wave = [0.0, 0.5]
    for value in noise[2:]:
        wave.append(first * wave[-1] - 0.8 * wave[-2] + 0.5 * float(value))
    series = torch.tensor(wave)
    windows = (series / series.std()).unfold(0, length + 1, 1)
    return split(windows[:, :-1].contiguous(), windows[:, -1].contiguous())


def purchases(seed: int, users: int = 60, items: int = 40) -> Split:
    """Pairs (user, item) and whether the user bought it, from hidden tastes of rank 2 and the item's popularity."""
    g = generator(seed)
    taste = torch.randn(users, 2, generator=g) @ torch.randn(2, items, generator=g)
    bought = taste + 0.5 * torch.randn(items, generator=g) > 0.2
    pairs = torch.cartesian_prod(torch.arange(users), torch.arange(items))
    return split(pairs, bought.flatten().float())


def spirals(seed: int, count: int = 900) -> Split:
    """Three interleaved spirals in two dimensions."""
    g = generator(seed)
    y = torch.randint(0, 3, (count,), generator=g)
    radius = torch.rand(count, generator=g) * 1.5 + 0.3
    angle = 1.6 * radius + y * (2 * math.pi / 3) + 0.15 * torch.randn(count, generator=g)
    return split(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), y)
