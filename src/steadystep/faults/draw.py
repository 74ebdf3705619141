"""Choices that depend on a seed and the step alone: the same on every machine, rank and day."""

import hashlib

import torch
from torch import Tensor


def draw(seed: int, step: int, what: str, count: int) -> int:
    """A number below `count`; `what` keeps two choices at one step apart.

    >>> draw(0, 500, "element", 10) == draw(0, 500, "element", 10)
    True
    """
    return _number(seed, step, what) % count


def permutation(seed: int, step: int, what: str, count: int) -> Tensor:
    """The numbers below `count` in another order, on the CPU; torch's own random numbers stay where they are."""
    rng = torch.Generator().manual_seed(_number(seed, step, what) >> 1)
    return torch.randperm(count, generator=rng)


def _number(seed: int, step: int, what: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{what}".encode()).digest()[:8], "big")
