"""Files and folders that are there whole or not at all, whenever the process or the machine stops.

A folder is made under a hidden name, reaches the disk, and is renamed. Hidden names carry who made them: what a dead
process left behind is removed by the next one that opens the place.

Tensors are one safetensors file. It is written by hand in pieces, so that each piece is hashed while it is in the
cache, the interpreter is free during both, and nothing is copied once more; it is read by the safetensors library,
which refuses headers that do not add up.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
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


_PIECE = 1 << 20  # bytes; small enough to be hashed and written from the cache
_HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:32] or "host"
_BIRTH = os.urandom(4).hex()  # why: in containers every process has the same number
_SERIAL = itertools.count()
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<host>\w+)-(?P<pid>\d+)-(?P<birth>[0-9a-f]{8})-\d+\.(?P<part>new|old|gone)")
_STRANGE_S = 86_400.0  # on a shared disk: whoever made this a day ago on another machine no longer writes it


@final
@dataclass(frozen=True, slots=True)
class FileMark:
    """What a file must be to be the one that was written."""

    size: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileMark:
    """Write a new file and wait until the disk has it."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for whole in pieces:
            for start in range(0, len(whole), _PIECE):
                piece = whole[start : start + _PIECE]
                digest.update(piece)
                file.write(piece)
                size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileMark(size, digest.hexdigest())


def mark_of(path: Path) -> FileMark:
    """Read the file once."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileMark(file.tell(), digest.hexdigest())


def hidden(path: Path, part: str) -> Path:
    """A name beside `path` that nobody else uses."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{_BIRTH}-{next(_SERIAL)}.{part}")


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows what is in the folder."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_in(new: Path, path: Path) -> None:
    """Give the folder `new` its name; one that has it already is replaced.

    Between the two renames of a replacement both are there under hidden names; `clear_leftovers` puts the old one back.
    """
    sync_folder(new)
    old = hidden(path, "old")
    if path.exists():
        os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder: first its name, so that no half of it is ever seen."""
    gone = hidden(path, "gone")
    os.rename(path, gone)
    shutil.rmtree(gone)


def clear_leftovers(folder: Path) -> None:
    """What dead processes left: an old one without its successor gets its name back, the rest goes."""
    for path in sorted(folder.iterdir()):
        found = _HIDDEN.fullmatch(path.name)
        if found is None:
            continue
        with suppress(OSError):  # why: another process may be doing the same
            whole = folder / found["name"]
            if found["part"] == "old" and not whole.exists():
                os.rename(path, whole)
                sync_folder(folder)
            elif not _alive(found["host"], int(found["pid"]), found["birth"], path):
                shutil.rmtree(path)


def _alive(host: str, pid: int, birth: str, path: Path) -> bool:
    if host != _HOST or os.name != "posix":  # elsewhere asking for a process by signal 0 would interrupt it
        return time.time() - path.stat().st_mtime < _STRANGE_S
    if pid == os.getpid():
        return birth == _BIRTH
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it belongs to somebody else
    return True


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
        raise UnsupportedError("checkpoints are little-endian, and this machine is big-endian")
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
