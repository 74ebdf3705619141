"""One incident on disk: a folder that holds all it takes to run the step again, and to read about it.

    incident-000600-rollback/
      incident.json   what, why, what was done, where it began, environment, settings
      history.jsonl   the last steps, one Outcome per line
      state/          what the step started from, as a checkpoint: nothing is ever unpickled
      batch/          what it computed from, the same; left out when it is too large or has no form in a file

It is written under a hidden name and gets its own when it is complete.
"""

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from steadystep._utils.text import must_end, text_of
from steadystep._utils.tree import tensors_in
from steadystep.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from steadystep.errors import CheckpointError, ConfigError
from steadystep.version import __version__

BUNDLE_FORMAT = 1
HIDDEN = ".incident-"
MEGABYTE = 1_000_000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An incident bundle that was read and checked."""

    path: Path
    """Folder of the bundle."""
    record: Mapping[str, Any]
    """Content of incident.json: what was measured, decided and done."""
    state: Mapping[str, Any] | None
    """Weights, optimizer state and random state before the step; None if they were not written."""
    batch: Any
    """The batch of the step, if `has_batch`."""
    has_batch: bool
    """Whether the bundle holds the batch."""


@final
class Draft:
    """A bundle that is being written: state and batch before anything is done about the incident, the rest after."""

    def __init__(self, folder: Path, *, step: int, updates: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._step, self._updates = step, updates
        self._path = folder / f"{HIDDEN}{step:06d}-{os.getpid()}"
        self.samples: list[int] = []
        self.notes: dict[str, str] = {"state": "not requested", "batch": "not passed as step(batch=...)"}
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir()

    def put_state(self, state: Mapping[str, Any], *, max_bytes: float = float("inf")) -> None:
        """As much of the state as fits: all of it, else without the optimizer, else nothing and a note."""
        bare = {**state, "optimizer": None}
        reason = ""
        for form, note in ((state, "kept"), (bare, "stored without the optimizer")):
            try:
                self._put("state", form, max_bytes)
            except CheckpointError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                reason = reason or str(error)
                continue
            self.notes["state"] = note + (f": {reason}" if reason else "")
            return
        self.notes["state"] = f"omitted: {reason}"

    def put_batch(self, batch: Any, *, max_bytes: float) -> None:
        """The batch, unless it is too large or has no form in a file; then a note. Indices of its samples anyway."""
        with suppress(Exception):  # why all: a batch is opened by its own code
            self.samples = sample_indices(batch)
        try:
            self._put("batch", {"batch": batch}, max_bytes)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.notes["batch"] = f"omitted: {error}"
        except (OSError, MemoryError):
            raise
        except Exception as error:  # why all: a batch is opened by its own code
            self.notes["batch"] = f"omitted: {type(error).__name__}: {error}"
        else:
            self.notes["batch"] = "kept"

    def _put(self, name: str, state: Mapping[str, Any], max_bytes: float) -> None:
        size = num_bytes(state)
        if size > max_bytes:
            raise CheckpointError(f"{size / MEGABYTE:,.1f} MB, more than the remaining {max_bytes / MEGABYTE:,.1f} MB")
        written = write_checkpoint(self._path, state, step=self._step, updates=self._updates)
        written.rename(self._path / name)

    def finish(self, name: str, record: Mapping[str, Any], history: Iterable[str]) -> Path:
        """Add the texts and give the folder its name; a number is added when the name is taken."""
        whole = {"format": BUNDLE_FORMAT, "step": self._step, "updates": self._updates, **record, "kept": self.notes}
        if self.samples:
            whole["samples"] = self.samples
        (self._path / "incident.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        with (self._path / "history.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in history)
        path, number = self._folder / name, 2
        while path.exists():
            path, number = self._folder / f"{name}-{number}", number + 1
        self._path.rename(path)
        return path

    def drop(self) -> None:
        """Nothing of it stays."""
        shutil.rmtree(self._path, ignore_errors=True)


_INDICES = ("index", "indices", "idx", "sample_index", "sample_indices", "sample_id", "sample_ids")
_MOST_INDICES = 4096


def sample_indices(batch: Any) -> list[int]:
    """Return the indices in the dataset of the samples of `batch`: a mapping with one of the usual keys, else nothing.

    >>> sample_indices({"x": torch.zeros(2), "index": torch.tensor([7, 3])})
    [7, 3]
    """
    found = next((batch[key] for key in _INDICES if key in batch), None) if isinstance(batch, Mapping) else None
    if isinstance(found, torch.Tensor):
        found = found.flatten()[:_MOST_INDICES].tolist()  # sync: at an incident only
    if not isinstance(found, list | tuple) or not all(type(one) is int for one in found):
        return []
    return list(found[:_MOST_INDICES])


def write_bundle(
    folder: Path,
    *,
    name: str,
    step: int,
    updates: int,
    record: Mapping[str, Any],
    history: Iterable[str] = (),
    state: Mapping[str, Any] | None = None,
    batch: Any = None,
    max_batch_bytes: float = 64 * MEGABYTE,
) -> Path:
    """Write a whole bundle to `folder/name` and return its path.

    Args:
        folder: folder of all bundles.
        name: name of this one.
        step: the optimizer step.
        updates: number of updates in the weights.
        record: content of incident.json.
        history: lines of JSON about the steps before.
        state: weights, optimizer state and random state.
        batch: the batch of the step.
        max_batch_bytes: a larger batch is left out.

    Raises:
        OSError, CheckpointError: it cannot be written; nothing of it stays.
    """
    draft = Draft(folder, step=step, updates=updates)
    try:
        if state is not None:
            draft.put_state(state)
        if batch is not None:
            draft.put_batch(batch, max_bytes=max_batch_bytes)
        return draft.finish(name, record, history)
    except BaseException:
        draft.drop()
        raise


def read_bundle(path: Path) -> Bundle:
    """Read and check the bundle in the folder `path`.

    Raises:
        ConfigError: there is no bundle, or its incident.json is not one.
        CheckpointError: its state or batch is damaged.
    """
    must_end(path)
    file = path / "incident.json"
    if not file.is_file():
        found = sorted(p.name for p in path.glob("**/incident-*") if p.is_dir()) if path.is_dir() else []
        hint = f": one of its subfolders is, such as {found[-1]}" if found else ""
        raise ConfigError(f"{path} is not an incident bundle: it has no incident.json{hint}")
    try:
        record = json.loads(text_of(file))
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ConfigError(f"{file} cannot be read ({why})") from None
    if not isinstance(record, dict) or record.get("format") != BUNDLE_FORMAT:
        raise ConfigError(f"{file} does not have format {BUNDLE_FORMAT}, the one this version of steadystep reads")
    has_batch = (path / "batch").is_dir()
    return Bundle(
        path=path,
        record=record,
        state=read_checkpoint(path / "state").state if (path / "state").is_dir() else None,
        batch=read_checkpoint(path / "batch").state["batch"] if has_batch else None,
        has_batch=has_batch,
    )


def bundles_in(folder: Path) -> list[Path]:
    """Complete bundles, by step."""
    return sorted((p for p in folder.glob("incident-*") if p.is_dir()), key=lambda p: (_step_of(p), p.name))


def folder_bytes(path: Path) -> int:
    """Bytes on disk."""
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _step_of(path: Path) -> int:
    number = path.name.split("-")[1]
    return int(number) if number.isdigit() else 0


def environment(folder: Path | None = None) -> dict[str, Any]:
    """Versions, devices, threads, and the git commit of `folder` (the working directory) where there is one."""
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        module = torch.get_device_module(kind)
        namer = getattr(module, "get_device_name", lambda i: f"{kind}:{i}")
        devices += [str(namer(i)) for i in range(torch.accelerator.device_count())]
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "steadystep": __version__,
        "platform": platform.platform(),
        "devices": devices,
        "threads": torch.get_num_threads(),
        "git": git_commit(Path.cwd() if folder is None else folder),
    }


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out around `folder`, read from files: starting git would take longer."""
    with suppress(OSError):
        for place in (folder, *folder.parents):
            git = place / ".git"
            if git.is_dir():
                return _commit(git)
    return None


def _commit(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head if re.fullmatch("[0-9a-f]{40,64}", head) else None
    name = head.removeprefix("ref: ")
    if (git / name).is_file():
        return (git / name).read_text().strip()
    packed = (git / "packed-refs").read_text()
    found = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", packed, re.M)
    return found.group(1) if found else None


def num_bytes(thing: Any) -> int:
    """What the tensors inside take."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_in(thing))
