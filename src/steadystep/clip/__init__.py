"""Gradient clipping that returns what it measured and never applies a non-finite norm."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed
from torch import Tensor

from steadystep._utils import lazy_names
from steadystep._utils.tensors import copies_in_mesh, is_sharded, local_part, without_partials
from steadystep.errors import UnsupportedError

if TYPE_CHECKING:
    from steadystep.clip.global_norm import ClipReport, clip_global_norm_, clip_value_
    from steadystep.clip.learned import NormRule, PercentileClip, ZScoreClip
    from steadystep.clip.per_tensor import TensorEMAClip, agc_

__all__ = [
    "ClipReport",
    "NormRule",
    "PercentileClip",
    "TensorEMAClip",
    "ZScoreClip",
    "agc_",
    "clip_global_norm_",
    "clip_value_",
]

__getattr__ = lazy_names(
    __name__,
    {
        "global_norm": ("ClipReport", "clip_global_norm_", "clip_value_"),
        "learned": ("NormRule", "PercentileClip", "ZScoreClip"),
        "per_tensor": ("TensorEMAClip", "agc_"),
    },
)


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def norms_over_ranks(grads: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]) -> list[Tensor]:
    """The L2 norm of each gradient as a plain tensor, measured in `dtypes`; one collective per mesh and dtype.

    On several meshes at once, which torch's own clipping refuses, by `norms_on_mesh`.
    """
    groups: dict[tuple[DeviceMesh | None, torch.dtype, torch.dtype | None], list[int]] = {}
    for position, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        mesh = cast("DTensor", grad).device_mesh if is_sharded([grad]) else None
        groups.setdefault((mesh, grad.dtype, dtype), []).append(position)
    norms: dict[int, Tensor] = {}
    mixed = len({mesh for mesh, _, _ in groups}) > 1
    for (mesh, _, dtype), positions in groups.items():
        group = [grads[i] for i in positions]
        if mesh is not None and mixed:
            each = norms_on_mesh([cast("DTensor", grad) for grad in group]).to(dtype or group[0].dtype)
            norms.update(zip(positions, each.to(grads[0].device).unbind(), strict=True))
            continue
        each = torch.stack(list(torch._foreach_norm(group, 2.0, dtype)))
        if mesh is not None:
            each = cast("DTensor", each).full_tensor()  # torch's own reduction, so the bits are torch's
        norms.update(zip(positions, each.to(grads[0].device).unbind(), strict=True))
    return [norms[i] for i in range(len(grads))]


def norms_on_mesh(grads: Sequence["DTensor"]) -> Tensor:
    """L2 norms of gradients on one mesh, in fp64: the root of the sum over its ranks of |local part|² ÷ copies.

    One all-reduce per dimension of the mesh.
    """
    mesh = grads[0].device_mesh
    if mesh.get_coordinate() is None:
        raise UnsupportedError("a parameter is on a mesh that this rank is not part of: pass only those that are")
    whole = [without_partials(grad) for grad in grads]
    squares = torch.stack([torch.linalg.vector_norm(local_part(g), 2.0, dtype=torch.float64) for g in whole]).square()
    squares /= torch.tensor([float(copies_in_mesh(grad)) for grad in whole]).to(squares)
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(squares, group=mesh.get_group(dim))
    return squares.sqrt()


def largest_over_ranks(peak: Tensor, grads: Iterable[Tensor]) -> Tensor:
    """The largest of all ranks' `peak`, over every mesh the gradients live on."""
    from torch.distributed.tensor import DTensor, Partial

    for mesh in dict.fromkeys(cast("DTensor", g).device_mesh for g in grads if is_sharded([g])):
        peak = DTensor.from_local(peak, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return peak


def l2_over_ranks(local: Tensor, model: Tensor) -> Tensor:
    """L2 norms of what all ranks hold, from `local` ones; `model` says over which ranks the parts are spread."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    spread = cast("DTensor", model)
    placements = [Replicate() if p.is_replicate() else Partial("sum") for p in spread.placements]
    squares = local.double().square()  # why: in fp32 the square of a norm of 1e20 is infinite
    return DTensor.from_local(squares, spread.device_mesh, placements, run_check=False).full_tensor().sqrt()
