"""Replicas that should hold the same bits: a checksum of all weights, now and then."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor, nn

from steadystep._utils.tensors import is_sharded
from steadystep.errors import UnsupportedError
from steadystep.records import REPLICAS_EVERY

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_PRIME = 1_048_573  # below 2^20; no power of two is a multiple of it, so one flipped bit always shows
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class Replicas:
    """The weights of this rank, as a number. Sharded weights have no replica and are left out."""

    def __init__(self, model: nn.Module, *, every: int = REPLICAS_EVERY) -> None:
        self._model = model
        self._every = every

    def checksum(self, step: int) -> int:
        """Of all weights at steps where replicas are compared, 0 at others. One pass over the weights."""
        if step % self._every:
            return 0
        return sum(place * number for place, number in enumerate(self.each()[1], start=1)) % _PRIME

    @torch.no_grad()
    def each(self) -> tuple[list[str], list[int]]:
        """Names and checksums, one by one."""
        named = {name: p for name, p in self._model.named_parameters() if not is_sharded([p])}
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


def _bits_added(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    whole = flat.reshape(-1).view(_AS_INTEGERS[flat.element_size()])
    return whole.sum(dtype=torch.int64).remainder(_PRIME)


def counts_here(name: str, parameter: Tensor, *, rank: int, size: int) -> bool:
    """Whether this rank's part of a gradient goes into its norm: every part once, copies once.

    Raises:
        UnsupportedError: it is spread over some of the ranks only, as by tensor or pipeline parallelism.
    """
    if not is_sharded([parameter]):
        return rank == 0
    spread = cast("DTensor", parameter)
    if spread.device_mesh.size() != size:
        raise UnsupportedError(
            f"{name} is on {spread.device_mesh.size()} of {size} ranks: this version requires every parameter on "
            "all ranks (DDP, fully_shard over all ranks, or both)"
        )
    place = spread.device_mesh.get_coordinate() or [0] * len(spread.placements)
    return all(at == 0 or not how.is_replicate() for at, how in zip(place, spread.placements, strict=True))


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that a forward pass of FSDP2 without a backward pass has left behind."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has used it has imported it
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
