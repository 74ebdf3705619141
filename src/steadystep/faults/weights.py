"""Weights that change by themselves: what a failing memory cell or link does."""

from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from steadystep.errors import UnsupportedError
from steadystep.faults.fault import Fault
from steadystep.faults.pick import pick

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flipped_bit(
    model: nn.Module, *, steps: Container[int], parameter: str | int = 0, element: int = 0, bit: int | None = None
) -> Fault:
    """One bit of one weight flips before the step. The damage stays, as it would in earnest.

    The default is the top bit of the exponent: any weight below 2 becomes huge (or, from 1 on, infinite or NaN).
    """
    _, target = pick(model, parameter)

    @contextmanager
    def flipped(step: int) -> Iterator[None]:
        flip(target, element, bit)
        yield

    return Fault(name="flipped-bit", steps=steps, around=flipped)


@torch.no_grad()
def flip(tensor: torch.Tensor, element: int, bit: int | None = None) -> None:
    """Flip one bit in place, counted from the lowest; None is the top bit of the exponent."""
    size = tensor.element_size()
    if not tensor.is_floating_point() or size not in _WHOLE:
        raise UnsupportedError(f"bits are flipped in real numbers of 2, 4 or 8 bytes, this is {tensor.dtype}")
    which = size * 8 - 2 if bit is None else bit
    bits = tensor.data.view(_WHOLE[size])
    where = torch.unravel_index(torch.tensor(element % tensor.numel()), bits.shape)
    bits[where] ^= 1 << which
