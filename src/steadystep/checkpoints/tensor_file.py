"""Tensors as one safetensors file.

Written by hand in pieces, so that each piece is hashed while it is in the cache, the interpreter is free during both,
and nothing is copied once more; read by the safetensors library, which refuses headers that do not add up.
"""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steadystep._utils.tensors import is_sharded, local_part, spread_like
from steadystep.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


RESERVED = "__metadata__"
"""The one name that a tensor cannot have."""

STORED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """The file, from beginning to end."""
    if sys.byteorder != "little":
        raise UnsupportedError("checkpoints are little-endian and this machine is not")
    # why by size: a wide number must not begin at an odd place
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {} if metadata is None else {RESERVED: dict(metadata)}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.numel():
            host = tensor.detach().to("cpu").resolve_neg().contiguous()  # sync: on writing, none if already on the host
            yield host.view(-1).view(torch.uint8).numpy().data  # sync: none, it is on the host


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Everything in the file, in memory of its own: the file may go away."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error})") from error


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
