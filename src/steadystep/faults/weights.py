"""Weights that change by themselves: what a failing memory cell or link does."""

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from steadystep.errors import UnsupportedError
from steadystep.faults.draw import draw
from steadystep.faults.fault import Fault
from steadystep.faults.pick import Place, put

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flipped_bit(
    model: nn.Module,
    *,
    steps: Container[int],
    parameter: str | int | None = 0,
    element: int | None = 0,
    bit: int | Literal["any"] | None = None,
    seed: int = 0,
) -> Fault:
    """One bit of one weight flips before the step. The damage stays, as it would in earnest.

    The default is the top bit of the exponent: any weight below 2 becomes huge (or, from 1 on, infinite or NaN).
    `parameter` and `element` are drawn from `seed` and the step where they are None, and so is the bit with "any".
    """
    place = Place(model, parameter=parameter, element=element, seed=seed)

    @contextmanager
    def flipped(step: int) -> Iterator[None]:
        target, number = place.at(step)
        flip(target, number, draw(seed, step, "bit", 8 * target.element_size()) if bit == "any" else bit)
        yield

    return Fault(name="flipped-bit", steps=steps, around=flipped)


def bad_weight(
    model: nn.Module,
    *,
    steps: Container[int],
    value: float = math.nan,
    parameter: str | int | None = None,
    element: int | None = None,
    seed: int = 0,
) -> Fault:
    """One weight becomes `value` before the step, and stays it. What is None is drawn from `seed` and the step."""
    place = Place(model, parameter=parameter, element=element, seed=seed)

    @contextmanager
    def spoilt(step: int) -> Iterator[None]:
        target, number = place.at(step)
        put(target, number, value)
        yield

    return Fault(name="bad-weight", steps=steps, around=spoilt)


@torch.no_grad()
def flip(tensor: torch.Tensor, element: int, bit: int | None = None) -> None:
    """Flip one bit in place, counted from the lowest; None is the top bit of the exponent."""
    size = tensor.element_size()
    if not tensor.is_floating_point() or size not in _WHOLE:
        raise UnsupportedError(f"bits are flipped in real numbers of 2, 4 or 8 bytes, this is {tensor.dtype}")
    which = size * 8 - 2 if bit is None else bit
    if not 0 <= which < size * 8:
        raise UnsupportedError(f"there is no bit {which} in a number of {size} bytes")
    bits = tensor.data.view(_WHOLE[size])
    where = torch.unravel_index(torch.tensor(element % tensor.numel()), bits.shape)
    bits[where] ^= 1 << which
