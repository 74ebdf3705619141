"""Batches that are not what they should be."""

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from steadystep.errors import MisuseError
from steadystep.faults.fault import Fault


def scaled_data(*, steps: Container[int], factor: float, part: int | str = 0) -> Fault:
    """One part of the batch times `factor`: inputs are mostly part 0 and targets part 1, or named in a mapping."""
    return Fault(name="scaled-data", steps=steps, change_batch=lambda _, batch: _scaled(batch, part, factor))


def _scaled(batch: Any, part: int | str, factor: float) -> Any:
    if isinstance(batch, Tensor):
        return _times(batch, factor)
    if part not in (batch if isinstance(batch, Mapping) else range(len(batch))):
        raise MisuseError(f"the batch has no part {part!r}")
    if isinstance(batch, Mapping):
        return {key: _times(value, factor) if key == part else value for key, value in batch.items()}
    return type(batch)(_times(value, factor) if i == part else value for i, value in enumerate(batch))


def _times(value: Any, factor: float) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise MisuseError(f"only a tensor of real numbers can be scaled, this part of the batch is {kind}")
    return value * factor
