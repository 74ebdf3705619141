"""Many numbers of many tensors, read on the host at once."""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor


@final
class Transfer:
    """One read for many numbers: `add` says where each will be, `read` brings them.

    >>> transfer = Transfer([torch.tensor(1.0), torch.tensor(2.0)])
    >>> losses = transfer.add([torch.tensor(3.0)])
    >>> values = transfer.read()
    >>> values[:2], values[losses]
    ([1.0, 2.0], [3.0])
    """

    __slots__ = ("_scalars", "together")

    def __init__(self, first: Iterable[Tensor] = (), second: Iterable[Tensor] = ()) -> None:
        self._scalars: list[Tensor] = [*first, *second]
        self.together: Tensor | None = None
        """After `read`, all of them side by side on their device; None where they were on several."""

    def __len__(self) -> int:
        return len(self._scalars)

    def add(self, scalars: Iterable[Tensor]) -> slice:
        """Tensors of no dimension; the place they will have in what `read` returns."""
        start = len(self._scalars)
        self._scalars.extend(scalars)
        return slice(start, len(self._scalars))

    def read(self, flat: Sequence[Tensor] = ()) -> list[float]:
        """All of them, then the elements of `flat`, tensors of one dimension each."""
        scalars = self._scalars
        if not scalars:
            return []
        try:
            self.together = torch.stack(scalars)
        except RuntimeError:  # more than one device; asking each of them would cost every step of everybody else
            return _read_mixed(scalars, flat)
        return _read(self.together, flat)


def _read(together: Tensor, flat: Sequence[Tensor]) -> list[float]:
    if flat:
        together = torch.cat([together, *(numbers.to(together.device) for numbers in flat)])
    values: list[float] = together.tolist()  # sync: once per look
    return values


def _read_mixed(scalars: Sequence[Tensor], flat: Sequence[Tensor]) -> list[float]:
    """Numbers of the host are read where they are; the others ride together from the first one's device."""
    away = [scalar for scalar in scalars if not scalar.is_cpu]
    if not away:
        return _read(torch.stack(list(scalars)), flat)
    values = _read(torch.stack([scalar.to(away[0].device) for scalar in away]), flat)
    read = iter(values)
    return [float(s) if s.is_cpu else next(read) for s in scalars] + values[len(away) :]  # sync: none on the host
