"""Parts of a model, by name or by position."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.text import nearest_names
from steadystep._utils.tree import children, rebuilt
from steadystep.errors import MisuseError
from steadystep.faults.fault import draw


def pick(model: nn.Module, which: str | int) -> tuple[str, nn.Parameter]:
    """Its name and itself; raises `MisuseError` when there is none."""
    named = _trained(model)
    if isinstance(which, int) and -len(named) <= which < len(named):
        return named[which]
    for name, parameter in named:
        if name == which:
            return name, parameter
    near = nearest_names(str(which), [name for name, _ in named])
    raise MisuseError(f"no trainable parameter {which!r}, there are {len(named)}{near}")


def pick_layer(model: nn.Module, which: str | int) -> nn.Module:
    """A module by name, or by position among those that hold trainable parameters themselves."""
    layers: dict[str, nn.Module] = dict(model.named_modules())
    if isinstance(which, str) and which in layers and any(p.requires_grad for p in layers[which].parameters()):
        return layers[which]
    owners = [(n, m) for n, m in layers.items() if any(p.requires_grad for p in m.parameters(recurse=False))]
    if isinstance(which, int) and -len(owners) <= which < len(owners):
        return owners[which][1]
    near = nearest_names(str(which), [name for name, _ in owners])
    raise MisuseError(f"no layer {which!r} with trainable parameters, there are {len(owners)}{near}")


@final
class Element:
    """One element of one parameter. What is None is drawn from the seed and the step."""

    def __init__(self, model: nn.Module, *, parameter: str | int | None, element: int | None, seed: int) -> None:
        self._model, self._element, self._seed = model, element, seed
        self._target = None if parameter is None else pick(model, parameter)[1]
        size = None if self._target is None else self._target.numel()
        if size is not None and element is not None and not -size <= element < size:
            raise MisuseError(f"no element {element} in parameter {parameter!r}, it has {size}")

    def at(self, step: int) -> tuple[nn.Parameter, int]:
        """The parameter and the number of the element, counted along its rows."""
        target = self._target
        if target is None:
            named = _trained(self._model)
            if not named:
                raise MisuseError("the model has no trainable parameter")
            target = named[draw(self._seed, step, "parameter", len(named))][1]
        size = target.numel()
        return target, draw(self._seed, step, "element", size) if self._element is None else self._element % size


@torch.no_grad()
def put(tensor: Tensor, element: int, value: float) -> None:
    """Set one element in place, whatever the memory layout."""
    tensor.data[torch.unravel_index(torch.tensor(element % tensor.numel()), tensor.shape)] = value


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


GradientHook = Callable[[Tensor], Tensor | None]


@contextmanager
def hooked(pairs: Iterable[tuple[nn.Parameter, GradientHook]]) -> Iterator[None]:
    """Each hook sees its parameter's gradient in every backward pass until the end, and may replace it.

    It comes before the gradient is added up or, in a distributed run, averaged: what one rank does reaches all.
    """
    handles = [parameter.register_hook(hook) for parameter, hook in pairs]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that can have a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def replaced(batch: Any, part: int | str, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with one part changed: a position in a tuple or list, a key of a mapping, a field of a dataclass.

    A batch that is one tensor is its own only part. The batch given stays as it is.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    inner = children(batch)
    if inner is None:
        raise MisuseError(f"parts of a {type(batch).__name__} cannot be changed: give tensors, tuples, lists, mappings")
    place = _place(batch, part)
    parts = [held for _, held in inner]
    parts[place] = change(_tensor(parts[place], part))
    return rebuilt(batch, parts)


def _place(batch: Any, part: int | str) -> int:
    """Of a part among the children of a batch."""
    if isinstance(batch, list | tuple):
        if not isinstance(part, int) or not -len(batch) <= part < len(batch):
            raise _no_part(part, [str(i) for i in range(len(batch))])
        return part
    keys = list(batch) if isinstance(batch, Mapping) else [field.name for field in dataclasses.fields(batch)]
    if part not in keys:
        raise _no_part(part, [str(key) for key in keys])
    return keys.index(part)


def _tensor(value: Any, part: int | str) -> Tensor:
    if not isinstance(value, Tensor):
        raise MisuseError(f"only a tensor of real numbers can be changed, part {part!r} is {type(value).__name__}")
    return value


def _no_part(part: int | str, known: list[str]) -> MisuseError:
    return MisuseError(f"the batch has no part {part!r}, it has {', '.join(known)}")
