"""Numbers of several devices, read on the host at once."""

from collections.abc import Sequence

import torch
from torch import Tensor


def read_together(together: Tensor, flat: Sequence[Tensor]) -> list[float]:
    """One tensor of one dimension, then the elements of `flat`."""
    if flat:
        together = torch.cat([together, *(numbers.to(together.device) for numbers in flat)])
    values: list[float] = together.tolist()  # sync: once per look
    return values


def read_mixed(scalars: Sequence[Tensor], flat: Sequence[Tensor]) -> list[float]:
    """Numbers of the host are read where they are; the others ride together from the first one's device."""
    away = [scalar for scalar in scalars if not scalar.is_cpu]
    if not away:
        return read_together(torch.stack(list(scalars)), flat)
    values = read_together(torch.stack([scalar.to(away[0].device) for scalar in away]), flat)
    read = iter(values)
    return [float(s) if s.is_cpu else next(read) for s in scalars] + values[len(away) :]  # sync: none on the host
