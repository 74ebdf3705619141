"""Gradient norms in one pass: per tensor and global, bit-equal to what `torch.nn.utils.clip_grad_norm_` computes.

Nothing here asks for `no_grad`: gradients do not require gradients, and entering the context costs as much as a norm.
Also here: numbers of several devices, read on the host at once, and the nodes of an autograd graph.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from steadystep.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HALVES = (torch.bfloat16, torch.float16)
_SMALL = 1024  # elements up to which one call for all tensors is quicker than one for each


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """How a list of gradients is grouped; made once, reused while the list keeps its shape."""

    num_tensors: int
    first: tuple[torch.device, torch.dtype] | None
    groups: tuple[tuple[int, ...], ...]
    """Positions by device and dtype, in the order torch's own clipping visits them."""
    half: bool
    sparse: bool

    def fits(self, grads: list[Tensor]) -> bool:
        """Cheap test that `grads` still looks like what this layout was made from."""
        return len(grads) == self.num_tensors and (not grads or (grads[0].device, grads[0].dtype) == self.first)


def layout_of(grads: list[Tensor]) -> Layout:
    """Group `grads` by device and dtype."""
    grouped = _group_tensors_by_device_and_dtype([[*grads]], with_indices=True) if grads else {}
    return Layout(
        num_tensors=len(grads),
        first=(grads[0].device, grads[0].dtype) if grads else None,
        groups=tuple(tuple(positions) for _, positions in grouped.values()),
        half=any(dtype in _HALVES for _, dtype in grouped),
        sparse=any(g.is_sparse for g in grads),
    )


def dense_values(grads: list[Tensor], layout: Layout, *, coalesce: bool = False) -> list[Tensor]:
    """Sparse gradients as their value tensors (aliases unless `coalesce`), everything else as it is."""
    if not layout.sparse:
        return grads
    return [(g.coalesce() if coalesce else g)._values() if g.is_sparse else g for g in grads]


def measure(grads: list[Tensor], layout: Layout) -> list[Tensor]:
    """The L2 norm of each gradient, in their order, on the first one's device, without a host read.

    Half-precision gradients are measured in fp32: a norm held in fp16 overflows at 65504.
    """
    if not grads:
        return []
    values = dense_values(grads, layout, coalesce=True)
    if len(layout.groups) == 1:
        return list(
            torch._foreach_norm(values, 2.0, torch.float32) if layout.half else torch._foreach_norm(values, 2.0)
        )
    norms: list[Tensor | None] = [None] * len(grads)
    for positions in layout.groups:
        group = [values[i] for i in positions]
        dtype = torch.float32 if group[0].dtype in _HALVES else None
        for position, norm in zip(positions, torch._foreach_norm(group, 2.0, dtype), strict=True):
            norms[position] = norm.to(grads[0].device)
    return [norm for norm in norms if norm is not None]


def peaks(tensors: list[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, NaN where it holds one; on their device. An L2 norm may overflow."""
    # why: on the host torch's infinity norm goes element by element, and takes fourteen times as long for large tensors
    large = [i for i, tensor in enumerate(tensors) if tensor.is_cpu and tensor.numel() > _SMALL]
    if not large:
        return list(torch._foreach_norm(tensors, torch.inf))
    small = [tensor for tensor in tensors if not (tensor.is_cpu and tensor.numel() > _SMALL)]
    found = list(torch._foreach_norm(small, torch.inf)) if small else []
    ends = torch.stack([end for i in large for end in torch.aminmax(tensors[i])])
    for i, peak in zip(large, ends.abs_().view(-1, 2).amax(1).unbind(), strict=True):
        found.insert(i, peak)
    return found


def total_norm(norms: list[Tensor], layout: Layout, stacked: Tensor | None = None) -> Tensor:
    """The global norm from the norms of the parts, added up in the order torch's clipping uses.

    `stacked` are the norms side by side, where somebody has them so: one kernel less.
    """
    if not norms:
        return torch.zeros(())
    if stacked is None or len(layout.groups) != 1:
        ordered = norms if len(layout.groups) == 1 else [norms[i] for positions in layout.groups for i in positions]
        stacked = torch.stack(ordered)
    total: Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return total


def total_norm_in_half(grads: list[Tensor], layout: Layout) -> Tensor:
    """The global norm as torch's clipping has it for half-precision gradients: rounded. Costs a second pass."""
    values = dense_values(grads, layout, coalesce=True)
    norms = [norm for positions in layout.groups for norm in torch._foreach_norm([values[i] for i in positions], 2.0)]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(grads[0].device) for norm in norms]), 2.0)
    return total


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


def reduced_gradient(parameter: Tensor) -> Tensor:
    """The gradient of `parameter`, laid out as the parameter is.

    Sequence parallelism leaves one that still waits for its sum over ranks. The optimizer would sum it up, more than
    once; from here on it is summed.
    """
    grad = parameter.grad
    assert grad is not None
    if is_sharded([grad]) and any(p.is_partial() for p in cast("DTensor", grad).placements):
        grad = parameter.grad = like(grad, parameter)
    return grad


def copies_in_mesh(tensor: Tensor) -> int:
    """How many ranks of its mesh hold the same part of a DTensor: the size of the dimensions it is replicated over."""
    spread = cast("DTensor", tensor)
    replicated = [dim for dim, how in enumerate(spread.placements) if how.is_replicate()]
    return math.prod(spread.device_mesh.size(dim) for dim in replicated)


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


def host_room(
    tensor: Tensor, old: Tensor | None, dtype: torch.dtype | None = None, *, contiguous: bool = False
) -> Tensor:
    """Host memory for a copy of `tensor`: that of `old` where it fits, pinned for a tensor of an accelerator."""
    dtype = dtype or tensor.dtype
    if old is not None and old.shape == tensor.shape and old.dtype == dtype:
        return old
    if tensor.device.type == "cpu" and not contiguous:
        return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.device.type == "cuda")


def copy_to_host_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Fill `targets`, which are in host memory, with the values of `sources` as they are now."""
    if not sources:
        return
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
    for device in {source.device for source in sources if source.device.type != "cpu"}:
        torch.accelerator.synchronize(device)  # sync: once per device and call, not once per tensor


def is_writable(tensor: Tensor) -> bool:
    """Dense memory of its own. Sparse, expanded, quantized, lazy and inference tensors are constants to us."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference():
        return False
    return not is_expanded(tensor)


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Where the first of them lives; the host without any."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def is_expanded(tensor: Tensor) -> bool:
    """Several of its elements share one place in memory, so that it cannot be written to."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def read_together(together: Tensor, flat: Sequence[Tensor]) -> list[float]:
    """One tensor of one dimension, then the elements of `flat`."""
    if flat:
        together = torch.cat([together, *(numbers.to(together.device) for numbers in flat)])
    values: list[float] = together.tolist()  # sync: once per look
    return values


def read_mixed(scalars: Sequence[Tensor], flat: Sequence[Tensor]) -> list[float]:
    """Numbers of the host are read where they are; the others ride together from the first one's device."""
    away = [scalar for scalar in scalars if not scalar.is_cpu]
    if not away:
        return read_together(torch.stack(list(scalars)), flat)
    values = read_together(torch.stack([scalar.to(away[0].device) for scalar in away]), flat)
    read = iter(values)
    return [float(s) if s.is_cpu else next(read) for s in scalars] + values[len(away) :]  # sync: none on the host


def is_dense(tensor: Tensor) -> bool:
    """Its elements fill one stretch of memory, in whatever order."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def type_name(dtype: torch.dtype) -> str:
    """What its values are: bool, whole, real or complex."""
    if dtype is torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else ("real" if dtype.is_floating_point else "whole")


def norm_of(gradient: Tensor) -> float:
    """The norm of a gradient, sparse or complex ones too, on the host."""
    return float(_sizes(gradient.coalesce().values() if gradient.is_sparse else gradient).norm())  # sync: asked for


def rms_of(tensor: Tensor) -> float:
    """The root mean square, on the host; 0 of no elements."""
    return float(_sizes(tensor).square().mean().sqrt()) if tensor.numel() else 0.0  # sync: asked for


def _sizes(tensor: Tensor) -> Tensor:
    return tensor.detach().abs() if tensor.is_complex() else tensor.detach().float()


def graph_nodes(tensors: Iterable[Tensor], seen: set[Any]) -> Iterator[Any]:
    """Yield each node of the autograd graph behind these tensors once; `seen` has those found so far."""
    below: Iterable[Any] = [t.grad_fn for t in tensors]
    waiting: list[Any] = []
    while True:
        new = dict.fromkeys(node for node in below if node is not None and node not in seen)
        seen.update(new)
        waiting += new
        if not waiting:
            return
        yield (node := waiting.pop())
        below = [parent for parent, _ in node.next_functions]
