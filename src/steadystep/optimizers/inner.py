"""Optimizers that hold others: their moments are in two places, or elsewhere than one would look."""

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from steadystep.optimizers.together import each_of


def all_inside(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizer and those it holds as attributes: Lookahead's inner one, ZeRO's local one.

    >>> import torch
    >>> adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    >>> adam.inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    >>> [type(each).__name__ for each in all_inside(adam)]
    ['Adam', 'SGD']
    """
    seen: set[int] = set()
    return tuple([inner for each in each_of(optimizer) for inner in _walk(each, seen)])


def gather_state(optimizer: Optimizer) -> None:
    """Bring a state that is spread over ranks (ZeRO) together on the first of them; all ranks call this."""
    for each in each_of(optimizer):
        consolidate = getattr(each, "consolidate_state_dict", None)
        if consolidate is not None:
            consolidate(to=0)


def own_state(optimizer: Optimizer) -> Any:
    """Return the state for a file of this rank alone: of an optimizer that is spread over ranks, this rank's part."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return [inner.state_dict() for inner in all_inside(optimizer)[1:]]
    return optimizer.state_dict()


def _walk(optimizer: Optimizer, seen: set[int]) -> Iterator[Optimizer]:
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    yield optimizer
    for value in tuple(vars(optimizer).values()):
        for inner in _optimizers_in(value):
            yield from _walk(inner, seen)


def _optimizers_in(value: Any) -> tuple[Optimizer, ...]:
    if isinstance(value, Optimizer):
        return (value,)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Optimizer):
        return tuple(each for each in value if isinstance(each, Optimizer))
    return ()
