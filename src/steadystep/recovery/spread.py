"""Tensors that are spread over ranks, in files: each rank writes its parts, anybody reads what he needs of them.

The files are safetensors with the offsets that `torch.distributed.checkpoint` keeps in their headers, so its reader
puts the parts together, for any number of ranks, and nothing is ever unpickled.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor

from steadystep.clip.sharded import is_sharded, local_part, spread_like
from steadystep.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FOLDER = "shards"
_VERSION, _INFO = "DCP_VERSION", "DCP_SHARDING_INFO"  # the keys of torch.distributed.checkpoint


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor whose values are in the shards of a checkpoint."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def offsets(tensor: Tensor) -> tuple[int, ...] | None:
    """Where this rank's part begins in the whole; None when it holds none, or a copy of another rank's."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spread = cast("DTensor", tensor)
    place = spread.device_mesh.get_coordinate()
    copied = place is None or any(
        at > 0 and how.is_replicate() for at, how in zip(place, spread.placements, strict=True)
    )
    if copied or not local_part(tensor).numel():
        return None
    _, begins = compute_local_shape_and_global_offset(spread.shape, spread.device_mesh, spread.placements)
    return tuple(begins)


def header(places: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """What goes into the header of a rank's file."""
    info = {name: {"saved_offsets": list(begins)} for name, begins in places.items()}
    return {_VERSION: "1.0", _INFO: json.dumps(info)}


def read_spread(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill `wanted` in place: DTensors with the parts that belong here, plain tensors with everything."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if not wanted:
        return
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself, when there is no process group
            load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error})") from error


def laid_out(saved: Tensor, like: Tensor) -> Tensor:
    """A whole tensor in the layout of `like`; each rank takes its part."""
    if not is_sharded([like]) or is_sharded([saved]) or saved.shape != like.shape:
        return saved
    from torch.distributed.tensor import distribute_tensor

    model = cast("DTensor", like)
    return distribute_tensor(saved.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


def room_for(saved: Spread, like: Tensor | None, device: torch.device) -> Tensor:
    """An empty tensor to read `saved` into: laid out as `like`, where that has its shape."""
    if like is not None and is_sharded([like]) and like.shape == saved.shape:
        part = local_part(like)
        return spread_like(torch.empty_like(part, dtype=saved.dtype), like)
    return torch.empty(saved.shape, dtype=saved.dtype, device=device)
