"""The manifest of a checkpoint: what is in it, how large, with which checksum, and its own checksum."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from steadystep.errors import CheckpointError
from steadystep.recovery.durable import FileMark

MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
STATE = "state.json"
FORMAT = 1
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
                "format": FORMAT,
                "steadystep": self.steadystep,
                "torch": self.torch,
                "time": self.time,
                "step": self.step,
                "updates": self.updates,
                "score": self.score if self.score is None or math.isfinite(self.score) else repr(self.score),
                "files": {name: {"size": m.size, "sha256": m.sha256} for name, m in self.files.items()},
            }
        )


def read_manifest(checkpoint: Path) -> Manifest:
    """Check everything that can be checked without reading the large files."""
    path = checkpoint / MANIFEST
    try:
        if not checkpoint.is_dir():
            raise CheckpointError(f"{checkpoint} is not a folder: a checkpoint is one")
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} has no {MANIFEST}: it was never finished, or only copied in part")
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: it is not ours")
        raw = path.read_bytes()
        manifest = _parse(raw, path)
        for name, mark in manifest.files.items():
            if not (checkpoint / name).is_file():
                raise CheckpointError(f"{checkpoint} has no {name}")
            size = (checkpoint / name).stat().st_size
            if size != mark.size:
                raise CheckpointError(
                    f"{checkpoint / name} has {size} bytes and not {mark.size}: it was cut or changed"
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
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    if claimed != FORMAT:
        writer = f"steadystep {known.get('steadystep')}"
        raise CheckpointError(f"{path} has format {claimed!r} of {writer}; this version reads {FORMAT}")
    try:
        return _typed(known)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a manifest of ours ({type(error).__name__}: {error})") from error


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
