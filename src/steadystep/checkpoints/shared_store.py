"""A folder of checkpoints that several ranks write together and choose from together."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, final

import torch

from steadystep._utils.text import warn
from steadystep.checkpoints.atomic_io import FOLDER, FileMark, header, mark_of, move_in, pieces, sync_folder, write_file
from steadystep.checkpoints.checkpoint import (
    MANIFEST,
    STATE,
    TENSORS,
    Checkpoint,
    Manifest,
    read_manifest,
    read_state,
)
from steadystep.checkpoints.packing import STAGE, Packed, pack
from steadystep.checkpoints.store import CheckpointStore, check_finite
from steadystep.errors import CheckpointError, ConfigError
from steadystep.parallel import Ranks
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


def share_is_whole(path: Path, manifest: Manifest, *, rank: int, size: int) -> str:
    """What is wrong with this rank's share of the files, so that all ranks together read each of them once; or ""."""
    for number, (name, expected) in enumerate(sorted(manifest.files.items())):
        if number % size == rank:
            with suppress(OSError):
                if mark_of(path / name) == expected:
                    continue
            return f"{path / name} is damaged: checksum mismatch"
    return ""


def _note(staging: Path, rank: int) -> Path:
    return staging / f"rank-{rank:05d}.done"


def _read_note(staging: Path, rank: int, patience: Callable[[], float]) -> Iterator[tuple[str, FileMark]]:
    started = time.monotonic()
    while not _note(staging, rank).exists():
        if time.monotonic() - started > patience():
            raise CheckpointError(f"{staging} is incomplete: rank {rank} did not write its part")
        time.sleep(_LOOK_S)
    marks = json.loads(_note(staging, rank).read_bytes())
    if marks is None:
        raise CheckpointError(f"{staging} was not written: rank {rank} has non-finite values")
    for name, mark in marks.items():
        yield name, FileMark(**mark)


_HURRY_S = 3.0
_OWN = ("random", "data", "buffers")
_OF_A_STAGE = (*_OWN, STAGE, "parameters", "optimizer")
"""Of a pipeline no rank has what another has."""


class Shelving(Protocol):
    """A folder of checkpoints."""

    @property
    def folder(self) -> Path:
        """Where they are."""
        ...

    def put(self, state: Mapping[str, Any] | Packed, *, step: int, updates: int, score: float | None = None) -> Path:
        """Write one."""
        ...

    def refuse(self, step: int) -> None:
        """There will be none of `step`."""
        ...

    def newest(self, among: Callable[[int], bool] = ...) -> Checkpoint | None:
        """The latest that is whole."""
        ...

    def best(self) -> Checkpoint | None:
        """The one with the lowest score that is whole."""
        ...


@final
class SharedCheckpointStore:
    """One that all ranks see. `put` sends no messages; the others are collectives, and all ranks get the same one."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep_last: int = 3) -> None:
        self._ranks = ranks
        self.folder = Path(folder)
        self._store, wrong = None, ""
        try:
            self._store = CheckpointStore(folder, keep_last=keep_last) if ranks.rank == 0 else None
        except ConfigError as error:
            wrong = str(error)
        wrong = ranks.texts(wrong)[0]  # what the first rank cannot do, none can
        if wrong:
            raise ConfigError(wrong)
        if ranks.rank == 0:
            for leftover in self.folder.glob(".*.parts"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._patience = PATIENCE_S
        self._run = ranks.texts(os.urandom(4).hex())[0]  # also: nobody goes on before the folder is tidy

    def put(self, state: Mapping[str, Any] | Packed, *, step: int, updates: int, score: float | None = None) -> Path:
        """Write this rank's part; rank 0 waits for the others and completes it."""
        packed = state if isinstance(state, Packed) else pack(state)
        path, staging = self.folder / f"step-{step:08d}", self._staging(step)
        try:
            write_part(staging, packed, rank=self._ranks.rank)
            if self._store is not None:
                finish(
                    staging,
                    path,
                    size=self._ranks.size,
                    step=step,
                    updates=updates,
                    score=score,
                    patience=lambda: self._patience,
                )
                self._store.tidy(step)
        except OSError as error:
            raise CheckpointError(
                f"{path} could not be written ({error.strerror or error}); existing files are unchanged"
            ) from error
        finally:
            if self._store is not None:
                shutil.rmtree(staging, ignore_errors=True)
        return path

    def refuse(self, step: int) -> None:
        """This rank's part is not to be written: the others need not wait for it."""
        if self._store is None:
            refuse_part(self._staging(step), rank=self._ranks.rank)
            return
        for leftover in self.folder.glob(f".*.{self._run}.parts"):  # of this one as far as it is there, and of earlier
            shutil.rmtree(leftover, ignore_errors=True)

    def _staging(self, step: int) -> Path:
        return self.folder / f".step-{step:08d}.{self._run}.parts"

    def hurry(self) -> None:
        """The run has failed: another rank may be dead, and is not waited for any longer."""
        self._patience = _HURRY_S

    def newest(self, among: Callable[[int], bool] = lambda step: True) -> Checkpoint | None:
        """The one of the latest step that every rank finds whole; only steps that are `among` certain ones count."""
        return self._first([] if self._store is None else filter(among, reversed(self._store.steps())))

    def best(self) -> Checkpoint | None:
        """The one with the lowest score that every rank finds whole."""
        return self._first([] if self._store is None else self._store.by_score())

    def _first(self, steps: Iterable[int]) -> Checkpoint | None:
        for step in json.loads(self._ranks.texts(json.dumps(list(steps)[:64]))[0]):
            found = read_shared(self.folder / f"step-{step:08d}", self._ranks)
            if found is not None:
                return found
        return None


def read_shared(path: Path, ranks: Ranks) -> Checkpoint | None:
    """A checkpoint that all ranks find whole, each with its own part of the state; else None, and a warning."""
    found, wrong = None, ""
    try:
        manifest = read_manifest(path)
        wrong = share_is_whole(path, manifest, rank=ranks.rank, size=ranks.size)
    except CheckpointError as error:
        wrong = str(error)
    every = [text for text in ranks.texts(wrong) if text]
    if not every:
        try:
            found = _for_this_rank(path, ranks)
            check_finite(found)
        except CheckpointError as error:
            wrong = str(error)
        every = [text for text in ranks.texts(wrong) if text]
    if every:
        if ranks.rank == 0:
            warn(f"{every[0]}; falling back to an older checkpoint, if there is one")
        return None
    return found


def _for_this_rank(path: Path, ranks: Ranks) -> Checkpoint:
    manifest = read_manifest(path)
    common = read_state(path, manifest, files_of(0))
    own = files_of(ranks.rank)
    state = dict(common.state)
    if ranks.rank > 0 and set(own) <= manifest.files.keys():
        mine = read_state(path, manifest, own)
        parts = _OF_A_STAGE if STAGE in mine.state else _OWN
        state |= {part: value for part, value in mine.state.items() if part in parts}
        common = replace(common, not_finite=(*common.not_finite, *mine.not_finite))
    saved = int(state.get("ranks", 1))
    if ranks.rank >= saved:
        state["random"] = None
    return replace(common, state=state)
