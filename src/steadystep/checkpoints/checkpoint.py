"""One checkpoint: a folder `step-00001234` with the tensors, the rest of the state, and a manifest with checksums.

Tensors are safetensors, the rest is JSON: reading a stranger's file can fail, it cannot run code.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch

from steadystep._utils.numbers import with_words
from steadystep.checkpoints.atomic_io import (
    FOLDER,
    FileMark,
    hidden,
    mark_of,
    move_in,
    pieces,
    read_tensors,
    write_file,
)
from steadystep.checkpoints.finite import not_finite
from steadystep.checkpoints.packing import Packed, pack, unpack
from steadystep.errors import CheckpointError
from steadystep.version import __version__

MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
STATE = "state.json"
CHECKPOINT_FORMAT = 1
_LARGEST = 1 << 20  # bytes; ours has less than a thousand, and 300 more for each rank
_OF_A_RANK = re.compile(r"(shards/)?rank-\d{5}\.(safetensors|json)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint, before its contents are read."""

    step: int
    updates: int
    score: float | None
    time: str
    steadystep: str
    torch: str
    files: Mapping[str, FileMark]

    def to_bytes(self) -> bytes:
        """The file."""
        return _render(
            {
                "format": CHECKPOINT_FORMAT,
                "steadystep": self.steadystep,
                "torch": self.torch,
                "time": self.time,
                "step": self.step,
                "updates": self.updates,
                "score": with_words(self.score),
                "files": {name: {"size": m.size, "sha256": m.sha256} for name, m in self.files.items()},
            }
        )


def read_manifest(checkpoint: Path) -> Manifest:
    """Check everything that can be checked without reading the large files."""
    path = checkpoint / MANIFEST
    try:
        if not checkpoint.is_dir():
            raise CheckpointError(f"{checkpoint} is not a directory: a checkpoint is a directory")
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} has no {MANIFEST}: it was not completed, or was copied only in part")
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: not a steadystep manifest")
        raw = path.read_bytes()
        manifest = _parse(raw, path)
        for name, mark in manifest.files.items():
            if not (checkpoint / name).is_file():
                raise CheckpointError(f"{checkpoint} has no {name}")
            size = (checkpoint / name).stat().st_size
            if size != mark.size:
                raise CheckpointError(
                    f"{checkpoint / name} has {size} bytes, expected {mark.size}: it was truncated or changed"
                )
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read ({error.strerror or error})") from error
    return manifest


def _parse(raw: bytes, path: Path) -> Manifest:
    try:
        fields = json.loads(raw)
        claimed = fields.pop("format")
        known = {"format": claimed} | fields
        known.pop("checksum")
        whole = _render(known) == raw
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    # why the bytes: what differs from what these fields give, if only in a space, is not what was written
    if not whole:
        raise CheckpointError(f"{path} is damaged: checksum mismatch")
    if claimed != CHECKPOINT_FORMAT:
        writer = f"steadystep {known.get('steadystep')}"
        raise CheckpointError(
            f"{path} has format {claimed!r}, written by {writer}; this version reads format {CHECKPOINT_FORMAT}"
        )
    try:
        return _typed(known)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a steadystep manifest ({type(error).__name__}: {error})") from error


def _typed(fields: dict[str, Any]) -> Manifest:
    files = {name: FileMark(int(mark["size"]), str(mark["sha256"])) for name, mark in fields["files"].items()}
    others = files.keys() - {TENSORS, STATE}
    if len(files) != len(others) + 2 or not all(_OF_A_RANK.fullmatch(name) for name in others):
        raise ValueError(f"it lists {', '.join(map(str, files)) or 'no files'}")
    score = fields["score"]
    return Manifest(
        step=int(fields["step"]),
        updates=int(fields["updates"]),
        score=None if score is None else float(score),
        time=str(fields["time"]),
        steadystep=str(fields["steadystep"]),
        torch=str(fields["torch"]),
        files=files,
    )


def _render(fields: Mapping[str, Any]) -> bytes:
    body = json.dumps(fields, indent=1, allow_nan=False)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**fields, "checksum": checksum}, indent=1, allow_nan=False).encode() + b"\n"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    """Folder of the checkpoint."""
    step: int
    """Step at which it was written."""
    updates: int
    """Number of updates in the weights."""
    score: float | None
    """Score it was written with; lower is better."""
    state: Mapping[str, Any]
    """The state."""
    not_finite: tuple[str, ...] = ()
    """Names of tensors with NaN or infinity that a run should not be continued from."""


def write_checkpoint(
    folder: Path, state: Mapping[str, Any] | Packed, *, step: int, updates: int, score: float | None = None
) -> Path:
    """Write one checkpoint into a folder and return its path, once it is on disk.

    If it fails, an earlier checkpoint of the same step is unchanged.

    Args:
        folder: an existing folder.
        state: the state: nested containers of tensors, arrays and plain values.
        step: step of the checkpoint; gives it its name.
        updates: number of updates in the weights.
        score: score for `CheckpointStore.best`; lower is better.

    Raises:
        CheckpointError: the state cannot be stored, or the disk refused; nothing that was there has changed.
    """
    if step < 0:
        raise CheckpointError(f"step = {step}: must be 0 or more")
    packed = state if isinstance(state, Packed) else pack(state)
    path = Path(folder) / f"step-{step:08d}"
    new = hidden(path, "new")
    try:
        new.mkdir()
        files = {
            TENSORS: write_file(new / TENSORS, pieces(packed.tensors)),
            STATE: write_file(new / STATE, [_json(packed.tree)]),
        }
        manifest = Manifest(
            step=int(step),  # why: numbers of numpy are not JSON
            updates=int(updates),
            score=None if score is None else float(score),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            steadystep=__version__,
            torch=torch.__version__,
            files=files,
        )
        write_file(new / MANIFEST, [manifest.to_bytes()])
        move_in(new, path)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error.strerror or error}); existing files are unchanged"
        ) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(new)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint at `path` and verify sizes and checksums of every file, the manifest included.

    Raises:
        CheckpointError: something is missing, damaged, or not ours; the message names it.
    """
    path = Path(path)
    manifest = read_manifest(path)
    named = re.fullmatch(r"step-(\d+)", path.name)  # under a name of its own ("best") a copy is welcome
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{path} contains step {manifest.step}: it was renamed")
    try:
        for name, expected in manifest.files.items():
            if mark_of(path / name) != expected:
                raise CheckpointError(f"{path / name} is damaged: checksum mismatch")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    return read_state(path, manifest, (TENSORS, STATE))


def read_state(path: Path, manifest: Manifest, names: tuple[str, str]) -> Checkpoint:
    """One pair of its files, tensors and the rest; their checksums were verified before."""
    file = path / names[1]
    try:
        tree = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not the JSON of a state ({error})") from error
    tensors = read_tensors(path / names[0])
    try:
        state = unpack(Packed(tree, tensors))
        spoilt = not_finite(tensors, tree)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{file} contains a {type(state).__name__}, not a state")
    if (path / FOLDER).is_dir():
        state = {**state, FOLDER: str(path / FOLDER)}
    return Checkpoint(
        path=path,
        step=manifest.step,
        updates=manifest.updates,
        score=manifest.score,
        state=state,
        not_finite=spoilt,
    )


def _json(tree: Any) -> bytes:
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
