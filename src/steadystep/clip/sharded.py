"""What changes when gradients are DTensors: every rank holds a part, and norms are over all of them.

`norms.py` may be given DTensors as long as all of them live on one mesh. A mixture (some parameters sharded, some not,
or two meshes) is refused by torch itself; here each mesh is reduced by itself and the results are put together. The
functions named `…_over_ranks` are collectives: all ranks of a mesh must call them, and all get the same numbers.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from steadystep.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


_PLAIN = (Tensor, Parameter)


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether any of them is a DTensor. Imports nothing: who has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def local_part(tensor: Tensor) -> Tensor:
    """The part this rank holds, sharing memory; a plain tensor as it is."""
    # why first: a state has hundreds of tensors, and to ask each at length took half the time of keeping a small one
    if type(tensor) in _PLAIN or not is_sharded([tensor]):
        return tensor
    with torch.no_grad():
        return cast("DTensor", tensor).to_local()


def refuse_unreduced(grads: Iterable[Tensor], what: str) -> None:
    """A gradient still waiting for its sum over ranks has no elements and no rows of its own."""
    for grad in grads:
        if is_sharded([grad]) and any(p.is_partial() for p in cast("DTensor", grad).placements):
            raise UnsupportedError(f"{what} needs gradients that are summed over ranks: redistribute Partial DTensors")


def norms_over_ranks(grads: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
    """The L2 norm of each gradient as a plain tensor, measured in `dtypes`; one collective per mesh and dtype."""
    groups: dict[tuple[DeviceMesh | None, torch.dtype, torch.dtype | None], list[int]] = {}
    for position, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        mesh = cast("DTensor", grad).device_mesh if is_sharded([grad]) else None
        groups.setdefault((mesh, grad.dtype, dtype), []).append(position)
    norms: dict[int, Tensor] = {}
    for (mesh, _, dtype), positions in groups.items():
        each = torch.stack(list(torch._foreach_norm([grads[i] for i in positions], 2.0, dtype)))
        if mesh is not None:
            each = cast("DTensor", each).full_tensor()  # torch's own reduction, so the bits are torch's
        norms.update(zip(positions, each.to(grads[0].device).unbind(), strict=True))
    return [norms[i] for i in range(len(grads))]


def largest_over_ranks(peak: Tensor, grads: Iterable[Tensor]) -> Tensor:
    """The largest of all ranks' `peak`, over every mesh the gradients live on."""
    from torch.distributed.tensor import DTensor, Partial

    for mesh in dict.fromkeys(cast("DTensor", g).device_mesh for g in grads if is_sharded([g])):
        peak = DTensor.from_local(peak, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return peak


def without_partials(tensor: Tensor) -> Tensor:
    """A result that still waits for its sum over ranks, summed; a plain tensor as it is."""
    if not is_sharded([tensor]):
        return tensor
    from torch.distributed.tensor import Replicate

    spread = cast("DTensor", tensor)
    return spread.redistribute(placements=[Replicate() if p.is_partial() else p for p in spread.placements])


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` laid out over the ranks as `model` is."""
    return cast("DTensor", tensor).redistribute(placements=cast("DTensor", model).placements)


def spread_like(local: Tensor, model: Tensor) -> Tensor:
    """This rank's part as a DTensor like `model`, where it has the shape of the model's part; else as it is."""
    if not is_sharded([model]) or local.shape != local_part(model).shape:
        return local
    from torch.distributed.tensor import DTensor

    spread = cast("DTensor", model)
    return DTensor.from_local(
        local, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )


def l2_over_ranks(local: Tensor, model: Tensor) -> Tensor:
    """L2 norms of what all ranks hold, from `local` ones; `model` says over which ranks the parts are spread."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    spread = cast("DTensor", model)
    placements = [Replicate() if p.is_replicate() else Partial("sum") for p in spread.placements]
    squares = local.double().square()  # why: in fp32 the square of a norm of 1e20 is infinite
    return DTensor.from_local(squares, spread.device_mesh, placements, run_check=False).full_tensor().sqrt()
