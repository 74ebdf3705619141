"""One checkpoint: a folder `step-00001234` with the tensors, the rest of the state, and a manifest with checksums.

Tensors are safetensors, the rest is JSON: reading a stranger's file can fail, it cannot run code.
"""

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

from steadystep.errors import CheckpointError
from steadystep.recovery.durable import hidden, mark_of, move_in, write_file
from steadystep.recovery.finite import not_finite
from steadystep.recovery.manifest import MANIFEST, STATE, TENSORS, Manifest, read_manifest
from steadystep.recovery.packing import Packed, pack, unpack
from steadystep.recovery.spread import FOLDER
from steadystep.recovery.tensor_file import pieces, read_tensors
from steadystep.version import __version__


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A state that was read and found to be what was written."""

    path: Path
    step: int
    updates: int
    score: float | None
    state: Mapping[str, Any]
    not_finite: tuple[str, ...] = ()
    """Names of tensors with NaN or infinity that a run should not be continued from."""


def write_checkpoint(
    folder: Path, state: Mapping[str, Any] | Packed, *, step: int, updates: int, score: float | None = None
) -> Path:
    """Write one checkpoint into `folder`, which exists; the disk has it when this returns.

    Whatever happens on the way, a checkpoint of that name is the one from before or the new one.

    Raises:
        CheckpointError: the state has no form in a file, or the disk refused; nothing that was there has changed.
    """
    if step < 0:
        raise CheckpointError(f"step = {step}: a step is 0 or more")
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
            f"{path} could not be written ({error.strerror or error}); what was there before is untouched"
        ) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(new)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify all of it: sizes and checksums of every file, the manifest's own too.

    Raises:
        CheckpointError: something is missing, damaged, or not ours; the message says what.
    """
    path = Path(path)
    manifest = read_manifest(path)
    named = re.fullmatch(r"step-(\d+)", path.name)  # under a name of its own ("best") a copy is welcome
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{path} holds step {manifest.step}: it was renamed")
    try:
        for name, expected in manifest.files.items():
            if mark_of(path / name) != expected:
                raise CheckpointError(f"{path / name} is damaged: its checksum does not fit")
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
        raise CheckpointError(f"{file} holds a {type(state).__name__} and not a state")
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
