"""One checkpoint written by several ranks: each its own files, the first one the manifest, when all are there.

    step-00001234/
      manifest.json            every file with its checksum
      state.json               what all ranks have in common, and rank 0's own random numbers and place in the data
      tensors.safetensors      the tensors of it; of a sharded model those that are not sharded
      rank-00001.json, ...     what belongs to another rank alone
      shards/rank-00000...     each rank's parts of sharded tensors

The ranks do not talk to each other here: this runs beside the training, whose messages must not be disturbed. They meet
in a hidden folder that has the name of the run, so that nothing of an earlier one is taken for theirs.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from steadystep.errors import CheckpointError
from steadystep.recovery.durable import FileMark, mark_of, move_in, sync_folder, write_file
from steadystep.recovery.manifest import MANIFEST, STATE, TENSORS, Manifest
from steadystep.recovery.packing import Packed
from steadystep.recovery.spread import FOLDER, header
from steadystep.recovery.tensor_file import pieces
from steadystep.version import __version__

_LOOK_S = 0.05
PATIENCE_S = 300.0  # a rank that has not written its part by then has died


def files_of(rank: int) -> tuple[str, str]:
    """The names of a rank's own tensors and state."""
    return (TENSORS, STATE) if rank == 0 else (f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json")


def write_part(staging: Path, packed: Packed, *, rank: int) -> None:
    """This rank's files, and last a note that they are complete."""
    staging.mkdir(exist_ok=True)
    tensors, state = files_of(rank)
    text = json.dumps(packed.tree, allow_nan=False, separators=(",", ":")).encode()
    marks = {
        tensors: write_file(staging / tensors, pieces(packed.tensors)),
        state: write_file(staging / state, [text]),
    }
    if packed.shards:
        (staging / FOLDER).mkdir(exist_ok=True)
        name = f"{FOLDER}/rank-{rank:05d}.safetensors"
        marks[name] = write_file(staging / name, pieces(packed.shards, header(packed.places)))
        sync_folder(staging / FOLDER)
    note = json.dumps({name: asdict(mark) for name, mark in marks.items()}).encode()
    hidden = staging / f".{rank}"
    write_file(hidden, [note])
    os.rename(hidden, _note(staging, rank))  # why: a note that can be seen is whole


def refuse_part(staging: Path, *, rank: int) -> None:
    """A note that this rank's part will not come."""
    staging.mkdir(exist_ok=True)
    write_file(staging / f".{rank}", [b"null"])
    os.rename(staging / f".{rank}", _note(staging, rank))


def finish(
    staging: Path,
    path: Path,
    *,
    size: int,
    step: int,
    updates: int,
    score: float | None,
    patience: Callable[[], float] = lambda: PATIENCE_S,
) -> None:
    """Wait for the notes of all ranks, so many seconds for each, and give the folder its name."""
    files: dict[str, FileMark] = {}
    for rank in range(size):
        files |= dict(_read_note(staging, rank, patience))
    for rank in range(size):
        _note(staging, rank).unlink()
    manifest = Manifest(
        step=int(step),
        updates=int(updates),
        score=None if score is None else float(score),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        steadystep=__version__,
        torch=torch.__version__,
        files=dict(sorted(files.items())),
    )
    write_file(staging / MANIFEST, [manifest.to_bytes()])
    move_in(staging, path)


def is_whole(path: Path, manifest: Manifest, *, rank: int, size: int) -> str:
    """What is wrong with this rank's share of the files, so that all ranks together read each of them once; or ""."""
    for number, (name, expected) in enumerate(sorted(manifest.files.items())):
        if number % size == rank:
            with suppress(OSError):
                if mark_of(path / name) == expected:
                    continue
            return f"{path / name} is damaged: its checksum does not fit"
    return ""


def _note(staging: Path, rank: int) -> Path:
    return staging / f"rank-{rank:05d}.done"


def _read_note(staging: Path, rank: int, patience: Callable[[], float]) -> Iterator[tuple[str, FileMark]]:
    started = time.monotonic()
    while not _note(staging, rank).exists():
        if time.monotonic() - started > patience():
            raise CheckpointError(f"{staging} was never finished: rank {rank} has not written its part")
        time.sleep(_LOOK_S)
    marks = json.loads(_note(staging, rank).read_bytes())
    if marks is None:
        raise CheckpointError(f"{staging} is not written: rank {rank} holds values that are not finite")
    for name, mark in marks.items():
        yield name, FileMark(**mark)
