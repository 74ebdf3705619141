"""The gradients a clip works on: taken from parameters and measured once, over all ranks if they are sharded."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from steadystep.clip import sharded
from steadystep.errors import MisuseError
from steadystep.norms import Layout, dense_values, layout_of, measure, total_norm

Params = Iterable[Parameter] | Iterable[tuple[str, Parameter]] | Parameter
"""What every clip accepts: `model.parameters()`, `model.named_parameters()` or a single parameter."""

_WANTED = "a clip takes parameters: give model.parameters(), model.named_parameters() or one parameter"
_HALVES = (torch.bfloat16, torch.float16)


def gradients_of(params: Params) -> list[Tensor]:
    """The gradients there are, in order."""
    found = _listed(params)
    if found and isinstance(found[0], tuple):
        found = [parameter for _, parameter in found]
    try:
        return [grad for parameter in found if (grad := parameter.grad) is not None]
    except AttributeError:
        raise MisuseError(f"{_WANTED}, got {type(params).__name__} of other things") from None


def named(params: Params) -> dict[str, Parameter]:
    """The parameters by name, or by position if they came without; one that comes twice is counted once."""
    found = _listed(params)
    seen: set[int] = set()
    result: dict[str, Parameter] = {}
    for position, item in enumerate(found):
        name, parameter = item if isinstance(item, tuple) else (str(position), item)
        if id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


def _listed(params: Params) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    if not isinstance(params, Iterable):
        raise MisuseError(f"{_WANTED}, got {type(params).__name__}")
    return list(params)


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """Gradients as plain tensors this rank may write to, with their norms over all ranks still on the device."""

    grads: list[Tensor]
    parts: list[Tensor]
    layout: Layout
    norms: list[Tensor]

    def total(self) -> Tensor:
        """The global norm."""
        return total_norm(self.norms, self.layout)


def measured(grads: list[Tensor], *, rounded: bool = False) -> Measured:
    """One pass over the gradients. Half precision is measured in fp32, or `rounded` as torch's own clipping does."""
    if sharded.is_sharded(grads):
        parts = [sharded.local_part(grad) for grad in grads]
        upcast = [None if rounded or grad.dtype not in _HALVES else torch.float32 for grad in grads]
        return Measured(grads, parts, layout_of(parts), sharded.norms_over_ranks(grads, upcast))
    norms_of = _rounded_norms if rounded else measure
    layout = _layout_if_alike(grads)
    if layout is not None:
        try:
            return Measured(grads, grads, layout, norms_of(grads, layout))
        except NotImplementedError:  # one of them is sparse; asking each would cost everybody else
            pass
    layout = layout_of(grads)
    return Measured(grads, grads, layout, norms_of(grads, layout))


def _rounded_norms(grads: list[Tensor], layout: Layout) -> list[Tensor]:
    if not layout.half:
        return measure(grads, layout)
    values = dense_values(grads, layout, coalesce=True)
    if len(layout.groups) == 1:
        return list(torch._foreach_norm(values, 2.0))
    norms: dict[int, Tensor] = {}
    for positions in layout.groups:
        norms.update(zip(positions, torch._foreach_norm([values[i] for i in positions], 2.0), strict=True))
    return [norms[i].to(grads[0].device) for i in range(len(grads))]


def _layout_if_alike(grads: list[Tensor]) -> Layout | None:
    # Nearly every model: one dtype on one device. Sorting the positions would cost a tenth of the norms themselves.
    if not grads or len(_group_tensors_by_device_and_dtype([[*grads]])) != 1:
        return None
    device, dtype = grads[0].device, grads[0].dtype
    everything = (tuple(range(len(grads))),)
    return Layout(len(grads), (device, dtype), everything, half=dtype in _HALVES, sparse=False)
