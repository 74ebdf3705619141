"""A state on disk instead of in memory: written like any file, read as memory that the system may drop again.

The file has no name: it is gone with the process, however that ends.
"""

import mmap
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, final

import torch
from torch import Tensor

from steadystep.recovery.holdings import Key
from steadystep.recovery.host_copy import copy_to_host_, host_room

_CHUNK = 64 * 2**20  # bytes on their way from an accelerator at a time
_ALIGN = 64


@final
class SpillFile:
    """Room for one state."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.close = weakref.finalize(self, self._file.close)

    def write(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Write them over what was there; return them as they are on disk.

        Raises:
            OSError: the disk is full or gone. What was there before is lost too.
        """
        places: dict[Key, int] = {}
        self._file.seek(0)
        position = 0
        for chunk in _chunks(tensors):
            for key, host in _on_host(chunk).items():
                position += self._put(memoryview(b"\0" * (-position % _ALIGN)))
                places[key] = position
                if host.numel():
                    data = host.reshape(-1).view(torch.uint8).numpy().data  # sync: none, it is on the host
                    position += self._put(data)
        self._put(memoryview(b"\0"))  # why: an empty file cannot be mapped
        # why a private copy: torch warns of memory that cannot be written to; nobody does
        memory = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        return {key: _mapped(memory, places[key], tensor) for key, tensor in tensors.items()}

    def _put(self, data: memoryview) -> int:
        written = 0
        while written < len(data):  # why: one call writes at most 2 GiB
            written += self._file.write(data[written:])
        return written


def _chunks(tensors: Mapping[Key, Tensor]) -> list[dict[Key, Tensor]]:
    found: list[dict[Key, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if size > _CHUNK:
            found.append({})
            size = 0
        found[-1][key] = tensor
        size += tensor.numel() * tensor.element_size()
    return found


def _on_host(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    away = {key: tensor for key, tensor in tensors.items() if not tensor.is_cpu}
    rooms = {key: host_room(tensor, None) for key, tensor in away.items()}
    copy_to_host_(list(rooms.values()), list(away.values()))
    return {key: rooms[key] if key in rooms else tensor.contiguous() for key, tensor in tensors.items()}


def _mapped(memory: mmap.mmap, start: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=start)
    return flat.view(like.shape)
