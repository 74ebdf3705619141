"""The same samples in another form: standardized, or dealt out anew."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from steadystep._utils.tree import children, rebuilt, tensors_in
from steadystep.examination.passes import rows


@final
@dataclass(frozen=True, slots=True)
class Scaling:
    """Mean and deviation of each feature of the first real-valued input."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, batches: Sequence[Any], parts: dict[str, Tensor], *, by_feature: bool = True) -> "Scaling | None":
        """That of the first real tensor of these that is of an unusual scale."""
        for name, tensor in parts.items():
            if tensor.is_floating_point() and tensor.dim() > int(by_feature):
                found = cls._measured([t for batch in batches for n, t in tensors_in(batch) if n == name])
                if found is not None and found.is_unusual:
                    return found
        return None

    @classmethod
    def _measured(cls, found: Sequence[Tensor]) -> "Scaling | None":
        if len({tensor.shape[1:] for tensor in found}) != 1:
            return None
        every = torch.cat([tensor.detach().float() for tensor in found])
        if not bool(every.isfinite().all()):  # sync: examined
            return None
        mean, deviation = every.mean(0), every.std(0)
        return cls(mean, deviation.where(deviation > 1e-12, torch.ones_like(deviation)))

    @property
    def is_unusual(self) -> bool:
        """Far from zero or of a size that layers are not made for."""
        size, spread = float(self.mean.abs().max()), float(self.deviation.max())  # sync: once per examination
        return size > 5.0 or spread > 5.0 or spread < 0.05

    def apply(self, tensor: Tensor) -> Tensor:
        """Standardize; another input than the one measured stays."""
        if tensor.shape[1:] != self.mean.shape or not tensor.is_floating_point():
            return tensor
        return (tensor - self.mean.to(tensor)) / self.deviation.to(tensor)


def mixed(batches: Sequence[Any]) -> list[Any] | None:
    """The same samples dealt out anew; None where batches do not fit together."""
    if len(batches) < 2:
        return None
    try:
        whole = _joined(list(batches))
    except (RuntimeError, TypeError, ValueError):
        return None
    sizes = {rows(tensor) for tensor in _leaves(whole)}
    if len(sizes) != 1:
        return None
    order = torch.randperm(sizes.pop(), generator=torch.Generator().manual_seed(0))
    size = math.ceil(len(order) / len(batches))
    return [_picked(whole, order[at : at + size]) for at in range(0, len(order), size)]


def together(batches: Sequence[Any], times: int) -> list[Any] | None:
    """Batches that are joined, so many into one; None where they do not fit together."""
    if len(batches) < 2:
        return None
    try:
        groups = [list(batches[at : at + times]) for at in range(0, len(batches), times)]
        return [_joined(group) for group in groups if len(group) == min(times, len(batches))]
    except (RuntimeError, TypeError, ValueError):
        return None


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    inner = [children(part) for part in parts]
    if any(each is None for each in inner):
        raise TypeError
    columns = zip(*[[part for _, part in each or ()] for each in inner], strict=True)
    return rebuilt(parts[0], [_joined(list(column)) for column in columns])


def _leaves(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    else:
        for _, part in children(thing) or ():
            yield from _leaves(part)


def _picked(thing: Any, order: Tensor) -> Any:
    if isinstance(thing, Tensor):
        return thing[order.to(thing.device)]
    return rebuilt(thing, [_picked(part, order) for _, part in children(thing) or ()])
