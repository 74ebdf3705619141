"""Optimizers that hold others: their moments are in two places, or elsewhere than one would look."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.optimizers.combined import each_of


class Trained(Protocol):
    """Knows which parameters an optimizer holds now: groups come and go."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """All of them."""
        ...


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


_MOST_ELEMENTS = 4096  # of a tensor, or items of a container: what is larger is no counter
_DEEPEST = 4
# Torch's own bookkeeping, what a scaler leaves there for the time of a step, and what is kept elsewhere.
_NOT_THEIRS = frozenset(
    ("state", "param_groups", "defaults", "step", "zero_grad", "grad_scale", "found_inf", "_step_supports_amp_scaling")
)


@final
class OwnValues:
    """What an optimizer holds on itself, as it is now: plain values, small tensors and generators."""

    __slots__ = ("_back", "_optimizer", "values")

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.values: dict[str, Any] = {}
        self._back: list[Callable[[], Any]] = []
        for name, value in vars(optimizer).items():
            if name in _NOT_THEIRS or name.startswith("_optimizer_"):
                continue
            generator = _generator(value)
            if generator is not None:
                self._back.append(generator)
            elif _is_plain(value, _DEEPEST):
                self.values[name] = copy.deepcopy(value)

    @torch.no_grad()
    def put_back(self) -> None:
        """As they were. What appeared since stays."""
        held = vars(self._optimizer)
        held.update({name: put_into(held.get(name), kept) for name, kept in self.values.items()})
        for restore in self._back:
            restore()


def _generator(value: Any) -> Callable[[], Any] | None:
    """What puts a generator back to where it is now."""
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if isinstance(value, torch.Generator):
        seed = value.get_state().clone()
        return lambda: value.set_state(seed)
    if isinstance(value, np.random.Generator):
        numbers = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", numbers)
    return None


def _is_plain(value: Any, depth: int) -> bool:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return True
    if isinstance(value, Tensor):
        # why no leaf: a parameter is not the optimizer's to keep
        return type(value) is Tensor and not value.requires_grad and value.numel() <= _MOST_ELEMENTS
    if depth == 0 or not isinstance(value, list | tuple | dict) or len(value) > _MOST_ELEMENTS:
        return False
    return all(_is_plain(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value))


def put_into(present: Any, kept: Any) -> Any:
    """Return `kept` again, in the tensors of `present` where they fit: others may hold them too, or views of them."""
    if isinstance(kept, Tensor):
        if isinstance(present, Tensor) and present.shape == kept.shape and present.dtype == kept.dtype:
            return present.copy_(kept)
        return kept.clone()
    if type(kept) is dict:
        there = present if isinstance(present, dict) else {}
        return {key: put_into(there.get(key), each) for key, each in kept.items()}
    if type(kept) in (list, tuple):
        held = present if isinstance(present, list | tuple) and len(present) == len(kept) else [None] * len(kept)
        return type(kept)([put_into(now, each) for now, each in zip(held, kept, strict=True)])
    return copy.deepcopy(kept)


def same_values(left: Any, right: Any) -> bool:
    """Equal to the last bit, tensors in containers too. NaN is equal to itself; what cannot be compared is passed."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and left.shape == right.shape and torch.equal(left.nan_to_num(), right.nan_to_num())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_values(each, right[key]) for key, each in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_values, left, right))
    if isinstance(left, bool | int | float | str) or isinstance(right, bool | int | float | str):
        return bool(left == right or (left != left and right != right))
    return True
