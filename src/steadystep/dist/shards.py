"""How parameters are spread over the ranks."""

import sys
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from steadystep.clip.sharded import is_sharded
from steadystep.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
            f"{name} lives on {spread.device_mesh.size()} of {size} ranks: in this version all ranks must share every "
            "parameter (DDP, fully_shard over all ranks, or both)"
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
