"""Room for the states of a run: memory, files, or memory at half the size for the optimizer's moments."""

import mmap
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, final

import torch
from torch import Tensor

from steadystep._utils.tensors import copy_to_host_, host_room
from steadystep._utils.text import note, warn
from steadystep.parallel import Ranks
from steadystep.snapshots.placement import Placement, interval_mult, place, protection
from steadystep.snapshots.tensor_state import Key

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


Tensors = dict[Key, Tensor]

_NEW = torch.empty(2, dtype=torch.float32, device="meta")  # stands for moments that the run no longer has


class Housed(Protocol):
    """A state that has its room."""

    tensors: Tensors
    file: SpillFile | None


@final
class Rooms:
    """Settles once, by the size of the first state, how many there are room for and where; then copies states there."""

    def __init__(
        self,
        *,
        count: int,
        memory_bytes: float,
        disk_bytes: float,
        folder: Path | None,
        min_interval: int,
        checkpoints: bool,
        ranks: Ranks,
    ) -> None:
        self.count = count
        """States there is room for."""
        self.interval = min_interval
        """Steps between two of them."""
        self._trust_steps = min_interval
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes if folder is not None else 0.0
        self._folder = folder
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._placed: Placement | None = None
        self._files: list[SpillFile] = []

    def decide(self, live: Tensors) -> None:
        """Decide where states go; all ranks must keep the same steps, so the largest part and the least room count."""
        if self._placed is not None or not self.count:
            return
        whole, compact = _sizes(live)
        size, compact_size = -self._ranks.least(-whole), -self._ranks.least(-compact)
        memory, disk = self._ranks.least(self._memory_bytes), self._ranks.least(self._disk_bytes)
        wanted = self.count
        placed = place(size=size, compact_size=compact_size, count=wanted, memory=memory, disk=disk)
        self._files = self._opened(placed.on_disk)
        placed = Placement(
            size=placed.size, in_memory=placed.in_memory, on_disk=len(self._files), is_compact=placed.is_compact
        )
        self._placed, self.count = placed, placed.count
        self.interval *= interval_mult(size, placed.count)
        said = protection(placed, interval=self.interval, trust_steps=self._trust_steps, checkpoints=self._checkpoints)
        if placed.in_memory >= wanted:
            note(said)
            return
        kept = f"{placed.count} instead of {wanted} are kept" if placed.count else "none is kept"
        more = "" if self._folder is not None or placed.count > 1 else "; with a run_dir snapshots can be kept on disk"
        warn(
            f"a snapshot of this run takes {size / 2**30:.2f} GiB and recovery.snapshot_memory_gb allows "
            f"{memory / 2**30:.2f}: {kept} ({said}{more})"
        )

    def fill(
        self, live: Tensors, old: Housed | None, others: Sequence[Housed]
    ) -> tuple[Tensors, SpillFile | None] | None:
        """Copy a state to the room of `old`, or to what `others` leave free. None when the disk would not take it."""
        file = old.file if old is not None else self._free_file(others)
        if file is None:
            rooms = old.tensors if old is not None else {}
            dtypes = {key: torch.bfloat16 for key, t in live.items() if _is_moment(key, t)} if self._is_compact else {}
            copies = {key: host_room(tensor, rooms.get(key), dtypes.get(key)) for key, tensor in live.items()}
            copy_to_host_(list(copies.values()), list(live.values()))
            return copies, None
        problem = ""
        tensors: Tensors = {}
        try:
            tensors = file.write(live)
        except OSError as error:
            problem = str(error)
        if self._ranks.least(float(not problem)) > 0:
            return tensors, file
        self._files.remove(file)
        file.close()
        self.count -= 1
        warn(
            f"a snapshot could not be written to {self._folder} ({problem or 'another rank'}): room for {self.count} "
            "left"
        )
        return None

    def whole(self, tensors: Tensors, live: Tensors) -> Tensors:
        """A state as it was given: what was kept in half precision in the precision it has in the run."""
        if not self._is_compact:
            return tensors
        halves = [key for key, t in tensors.items() if t.dtype is torch.bfloat16]
        halved = {key for key in halves if _is_moment(key, live.get(key, _NEW))}
        return {key: t.float() if key in halved else t for key, t in tensors.items()}

    @property
    def _is_compact(self) -> bool:
        return self._placed is not None and self._placed.is_compact

    def _free_file(self, others: Sequence[Housed]) -> SpillFile | None:
        used = [state.file for state in others if state.file is not None]
        if self._placed is None or len(others) - len(used) < self._placed.in_memory:
            return None
        return next((file for file in self._files if file not in used), None)

    def _opened(self, count: int) -> list[SpillFile]:
        files: list[SpillFile] = []
        problem = ""
        try:
            while self._folder is not None and len(files) < count:
                files.append(SpillFile(self._folder))
        except OSError as error:
            problem = str(error)
        usable = int(self._ranks.least(float(len(files))))
        if usable < count:
            warn(f"snapshots cannot be stored in {self._folder} ({problem or 'another rank'})")
        return files[:usable]


def _is_moment(key: Key, tensor: Tensor) -> bool:
    return key[0] == "state" and tensor.dtype is torch.float32 and tensor.numel() > 1


def _sizes(live: Tensors) -> tuple[float, float]:
    """Bytes of a state, whole and with moments in half precision."""
    sizes = {key: float(tensor.numel() * tensor.element_size()) for key, tensor in live.items()}
    parameters = sum(size for key, size in sizes.items() if key[0] == "parameter")
    # why 3: Adam's moments appear with the first update, after this is asked
    whole = max(3 * parameters, sum(sizes.values()))
    buffers = sum(size for key, size in sizes.items() if key[0] == "buffer")
    return whole, parameters + buffers + (whole - parameters - buffers) / 2
