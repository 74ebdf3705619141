"""Numbers that ride to the host together."""

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor


@final
class Transfer:
    """One read for many numbers: `add` says where each will be, `read` brings them.

    >>> transfer = Transfer()
    >>> norms, losses = transfer.add([torch.tensor(1.0), torch.tensor(2.0)]), transfer.add([torch.tensor(3.0)])
    >>> values = transfer.read()
    >>> values[norms], values[losses]
    ([1.0, 2.0], [3.0])
    """

    __slots__ = ("_scalars",)

    def __init__(self) -> None:
        self._scalars: list[Tensor] = []

    def add(self, scalars: Iterable[Tensor]) -> slice:
        """Tensors of no dimension; the place they will have in what `read` returns."""
        start = len(self._scalars)
        self._scalars.extend(scalars)
        return slice(start, len(self._scalars))

    def read(self, flat: "list[Tensor] | tuple[Tensor, ...]" = ()) -> list[float]:
        """All of them, then the elements of `flat`, tensors of one dimension each."""
        scalars = self._scalars
        if not scalars:
            return []
        try:
            together = torch.stack(scalars)
        except RuntimeError:  # more than one device; asking each of them would cost every step of everybody else
            together = torch.stack([scalar.to(scalars[0].device) for scalar in scalars])
        if flat:
            together = torch.cat([together, *(numbers.to(together.device) for numbers in flat)])
        values: list[float] = together.tolist()  # sync: once per look
        return values
