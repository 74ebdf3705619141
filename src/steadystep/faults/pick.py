"""Parts of a model, by name or by position."""

from typing import final

import torch
from torch import Tensor, nn

from steadystep.errors import MisuseError
from steadystep.faults.draw import draw
from steadystep.names import nearest_names


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
class Place:
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
