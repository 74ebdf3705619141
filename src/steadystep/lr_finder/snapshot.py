"""Everything a training step can change, put back exactly, however the steps ended.

The model is left as it was found. The optimizer's state and its groups are set aside untouched, the steps work on
fresh ones, and the very same objects return.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.as_found import TensorCopy, left_as_found


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Leave no trace of what happens inside the block, also when an exception or Ctrl-C ends it.

    >>> model = nn.Linear(1, 1)
    >>> before = model.weight.item()
    >>> with restored(model, torch.optim.SGD(model.parameters(), lr=1.0)):
    ...     _ = nn.init.zeros_(model.weight)
    >>> model.weight.item() == before
    True
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with left_as_found(model, held, generators):
        parts = _OptimizerParts(optimizer)
        try:
            yield
        finally:
            parts.put_back()


@final
class _OptimizerParts:
    """State, groups and whatever else the optimizer keeps (a torch scheduler leaves a flag there, say)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = dict(optimizer.state)
        fresh = copy.deepcopy(list(self._state.values()))
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        tensors = [t for _, values in self._groups for t in values.values() if isinstance(t, Tensor)]
        self._copies = [TensorCopy(t) for t in tensors]
        self._attributes = dict(vars(optimizer))
        optimizer.state.clear()
        optimizer.state.update(zip(self._state, fresh, strict=True))

    def put_back(self) -> None:
        _refill(vars(self._optimizer), self._attributes)
        _refill(self._optimizer.state, self._state)
        for group, values in self._groups:
            _refill(group, values)
        for kept in self._copies:  # a learning rate may be a tensor
            kept.put_back()


def generators_of(source: object) -> list[torch.Generator]:
    """Those a DataLoader draws from, itself and through its sampler."""
    if not isinstance(source, torch.utils.data.DataLoader):
        return []
    held: Iterable[Any] = (source.generator, getattr(source.sampler, "generator", None))
    return list({id(g): g for g in held if isinstance(g, torch.Generator)}.values())


def _refill(mapping: dict[Any, Any], values: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(values)
