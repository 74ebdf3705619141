"""A folder of checkpoints: the last few and the best one."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from steadystep._utils.text import warn
from steadystep.checkpoints.checkpoint import Checkpoint, Manifest, read_checkpoint, read_manifest, write_checkpoint
from steadystep.checkpoints.files import clear_leftovers, remove
from steadystep.checkpoints.finite import said
from steadystep.checkpoints.packing import Packed
from steadystep.errors import CheckpointError, ConfigError

_NAME = re.compile(r"step-(\d{8,})")
_LOOKS = 3  # a writer may replace or tidy away what was just listed; then the folder is listed again


@final
class CheckpointStore:
    """Puts checkpoints into a folder and gives back the newest or the best that is whole.

    One process writes to a folder; any number may read. `keep_last` counts the one just written. Lower scores are
    better. Opening it removes what a killed process left half-written.
    """

    def __init__(self, folder: Path, *, keep_last: int = 3, keep_best: bool = True) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last = {keep_last}: at least the newest checkpoint is kept")
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._complained = False
        self._not_finite: set[int] = set()
        """Steps that were read and are nothing to continue from: they take no good one's place."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.folder)
        except OSError as error:
            raise ConfigError(f"{self.folder}: checkpoints cannot be kept there ({error.strerror})") from None

    def put(self, state: Mapping[str, Any] | Packed, *, step: int, updates: int, score: float | None = None) -> Path:
        """Write a checkpoint; only when the disk has it, older ones that are no longer wanted are removed.

        One of the same step is replaced. Those of later steps (from a run that was continued at an earlier point) stay.
        """
        with suppress(OSError):  # somebody may have deleted it; what cannot be made is said when it is written to
            self.folder.mkdir(parents=True, exist_ok=True)
        path = write_checkpoint(self.folder, state, step=step, updates=updates, score=score)
        self._not_finite.discard(step)
        self.tidy(step)
        return path

    def refuse(self, step: int) -> None:
        """There will be none of `step`; nobody else waits for it."""

    def newest(self, among: Callable[[int], bool] = lambda step: True) -> Checkpoint | None:
        """The one of the latest step that is whole and finite; what is not is named in a warning and passed over.

        Only steps that are `among` certain ones count.
        """
        return self._first(lambda: filter(among, reversed(self.steps())))

    def best(self) -> Checkpoint | None:
        """The one with the lowest score that is whole and finite; of equals the latest."""
        return self._first(self.by_score)

    def steps(self) -> list[int]:
        """Of every checkpoint here, whole or not, in ascending order."""
        try:
            found = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        except OSError:
            return []
        return sorted(int(match[1]) for match in found if match)

    def _first(self, listed: Callable[[], Iterable[int]]) -> Checkpoint | None:
        found: Checkpoint | None = None
        damaged: list[str] = []
        for _ in range(_LOOKS):
            found, damaged, moved = None, [], False
            for step in listed():
                try:
                    found = read_checkpoint(self._path(step))
                    check_finite(found)
                    break
                except CheckpointError as error:
                    if found is not None:
                        self._not_finite.add(step)
                    found = None
                    if self._path(step).exists():
                        damaged.append(str(error))
                    else:
                        moved = True
            if found or not moved:
                break
        if damaged:
            instead = f"{found.path} is used instead" if found else "there is no whole one"
            warn(f"{'; '.join(damaged)}; {instead}")
        return found

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _whole(self, steps: Iterable[int]) -> dict[int, Manifest]:
        """Those that look whole, without reading the large files."""
        found = {}
        for step in steps:
            with suppress(CheckpointError):
                found[step] = read_manifest(self._path(step))
        return found

    def by_score(self) -> list[int]:
        """Steps with a score, the best first."""
        scores = {step: manifest.score for step, manifest in self._whole(self.steps()).items()}
        known = {step: score for step, score in scores.items() if score is not None and not math.isnan(score)}
        return sorted(known, key=lambda step: (known[step], -step))

    def tidy(self, written: int) -> None:
        """Only what is older than the one just written, and so never the newest that is whole."""
        older = [step for step in self.steps() if step < written]
        usable = [step for step in self._whole(older) if step not in self._not_finite]
        wanted = set(sorted(usable, reverse=True)[: self._keep_last - 1])
        if self._keep_best:
            wanted.update(self.by_score()[:1])
        for step in older:
            if step not in wanted:
                self._remove(step)

    def _remove(self, step: int) -> None:
        try:
            remove(self._path(step))
        except OSError as error:
            if not self._complained:
                self._complained = True
                warn(f"{self._path(step)} is no longer wanted and cannot be removed ({error.strerror or error})")


def check_finite(found: Checkpoint) -> None:
    """Raise CheckpointError for one that nothing can be learned from."""
    if found.not_finite:
        raise CheckpointError(f"{found.path} holds values that are not finite ({said(found.not_finite)})")
