"""Replicas that should hold the same bits: a checksum of all weights, now and then; and how many ranks hold a part."""

import sys
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import copies_in_mesh, is_sharded
from steadystep.errors import UnsupportedError
from steadystep.records import REPLICAS_EVERY

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_PRIME = 1_048_573  # below 2^20; no power of two is a multiple of it, so one flipped bit always shows
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class Replicas:
    """The weights of this rank, as a number. Sharded weights have no replica and are left out."""

    def __init__(self, model: nn.Module, *, every: int = REPLICAS_EVERY, own: Container[int] = ()) -> None:
        self._model = model
        self._every = every
        self._own = own
        """Identities of parameters that have no replica."""

    def checksum(self, step: int) -> int:
        """Of all weights at steps where replicas are compared, 0 at others. One pass over the weights."""
        if step % self._every:
            return 0
        return sum(place * number for place, number in enumerate(self.each()[1], start=1)) % _PRIME

    @torch.no_grad()
    def each(self) -> tuple[list[str], list[int]]:
        """Names and checksums, one by one."""
        held = self._model.named_parameters()
        named = {name: p for name, p in held if not is_sharded([p]) and id(p) not in self._own}
        sums = [_bits_added(parameter) for parameter in named.values()]
        together = torch.stack([total.to(sums[0].device) for total in sums]) if sums else torch.empty(0)
        return list(named), together.tolist()  # sync: at a cadence


def odd_ones(names: Sequence[str], every: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Who differs from what most ranks have; of two that differ, nobody knows which one is right."""
    found = []
    for place, name in enumerate(names):
        held = [checksums[place] for checksums in every]
        baseline, count = Counter(held).most_common(1)[0]
        if count == len(held):
            continue
        odd = [rank for rank, checksum in enumerate(held) if checksum != baseline]
        sure = 2 * count > len(held)
        found.append(f"{name} on rank {', '.join(map(str, odd))}" if sure else f"{name} on some rank")
    return tuple(found)


def healthy_rank(every: Sequence[Sequence[int]]) -> int | None:
    """The first rank that holds what most ranks hold, all of it; None where no state has a majority.

    >>> healthy_rank([[1, 7], [1, 2], [1, 2]]), healthy_rank([[1], [2]])
    (1, None)
    """
    rows = [tuple(row) for row in every]
    baseline, count = Counter(rows).most_common(1)[0]
    return rows.index(baseline) if 2 * count > len(rows) else None


@torch.no_grad()
def broadcast(
    model: nn.Module,
    optimizer: Optimizer,
    send: Callable[[Tensor], None],
    device: torch.device,
    *,
    own: Container[int] = (),
) -> None:
    """Send every weight that has copies, and its moments; buffers, and what is in `own`, are each rank's own."""
    held = {id(p): p for p in model.parameters() if id(p) not in own}
    held |= {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) not in own}
    for parameter in held.values():
        slots = optimizer.state.get(parameter, {})
        moments = [slots[name] for name in sorted(slots) if isinstance(slots[name], Tensor)]
        for tensor in (parameter, *moments):
            if not is_sharded([tensor]):
                sent = tensor.detach().contiguous()
                sent = sent.to(device) if sent.device.type == "cpu" else sent
                send(sent)
                tensor.copy_(sent)


def _bits_added(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    whole = flat.reshape(-1).view(_AS_INTEGERS[flat.element_size()])
    return whole.sum(dtype=torch.int64).remainder(_PRIME)


def copies_of_all(
    parameters: Sequence[Tensor],
    size: int,
    summed: Callable[[list[float]], list[float]],
    *,
    own: Container[int] = (),
) -> list[float]:
    """How many of `size` ranks hold the same part of each; asks the others where a mesh is smaller than the world.

    Of those whose identity is in `own` each rank has another.
    """
    if all(mesh_size(parameter) in (1, size) for parameter in parameters):
        holders = [float(size)] * len(parameters)
    else:
        holders = summed([float(is_here(parameter)) for parameter in parameters])
    counted = zip(parameters, holders, strict=True)
    return [1.0 if id(parameter) in own else copies(parameter, holders=count) for parameter, count in counted]


def mesh_size(parameter: Tensor) -> int:
    """How many ranks share it: those of its mesh, or this one alone for a plain tensor."""
    return cast("DTensor", parameter).device_mesh.size() if is_sharded([parameter]) else 1


def is_here(parameter: Tensor) -> bool:
    """Whether this rank holds a part of it: it may be outside of its mesh."""
    return not is_sharded([parameter]) or cast("DTensor", parameter).device_mesh.get_coordinate() is not None


def copies(parameter: Tensor, *, holders: float) -> float:
    """How many ranks hold the same part, where `holders` ranks hold a part of it.

    Inside its mesh that is the size of the dimensions it is replicated over. Ranks outside hold it on a mesh of the
    same shape, one for each replica: data parallelism around a mesh for tensor parallelism.
    """
    if not is_sharded([parameter]):
        return holders
    return copies_in_mesh(parameter) * holders / mesh_size(parameter)


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that a forward pass of FSDP2 without a backward pass has left behind."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has used it has imported it
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def refuse_join(wrapped: Any) -> None:
    """Raise inside DDP's join(): a rank without batches answers DDP's messages there, and would not answer ours."""
    config = getattr(wrapped, "_join_config", None)
    if config is not None and config.enable:
        raise UnsupportedError(
            "DistributedDataParallel.join() lets ranks continue after others ran out of batches, and then they "
            "cannot agree: remove join() and use guard.batches(loader), which ends on all ranks with the "
            "shortest, or drop_last"
        )
