"""One run, killed at least once, started again until it has finished, and compared with the run that nobody killed."""

import random
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from killing.jobs import Job
from killing.moments import IN_THE_LOOP, ON_DISK, Moment
from killing.nursery import Nursery
from killing.variants import Variant
from steadystep.checkpoints.checkpoint import read_checkpoint
from steadystep.errors import CheckpointError

BY_THE_CLOCK = "by the clock"
KINDS = (BY_THE_CLOCK, *ON_DISK, BY_THE_CLOCK, *IN_THE_LOOP)
_TRIES = 20  # a moment that is drawn may come after the end


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The run that nobody killed."""

    variant: Variant
    parts: Mapping[str, str]
    counts: Mapping[str, int]
    seconds: float


@final
@dataclass(slots=True, kw_only=True)
class Told:
    """What became of one killed run."""

    kind: str
    kills: list[str] = field(default_factory=list)
    half_written: int = 0
    """Kills that left a checkpoint that was being written."""
    from_the_start: int = 0
    """Kills before there was any checkpoint."""
    unreadable: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """To the last bit."""
        return not self.wrong


def whole(nursery: Nursery, variant: Variant, desk: Path) -> Whole:
    """Without checkpoints, and with them: already these two must not differ."""
    plain = nursery.run(Job(variant=variant, desk=str(desk)))
    started = time.perf_counter()
    saving = nursery.run(Job(variant=variant, desk=str(desk), folder=str(desk / "whole")))
    seconds = time.perf_counter() - started
    if plain.result is None or saving.result is None:
        raise RuntimeError(f"the program does not reach its end: {plain.said}{saving.said}")
    if plain.result["parts"] != saving.result["parts"]:
        raise RuntimeError(f"{variant} is not repeatable")
    shutil.rmtree(desk / "whole")
    return Whole(variant=variant, parts=saving.result["parts"], counts=saving.result["counts"], seconds=seconds)


def killed_and_resumed(nursery: Nursery, run: Whole, desk: Path, *, kind: str, rng: random.Random) -> Told:
    """Kill it at a moment of this kind, perhaps again when it has been resumed, then let it finish."""
    told, folder = Told(kind=kind), desk / "run"
    for attempt in range(_TRIES):
        if _killed(nursery, run, folder, desk, told, kind=kind, rng=rng, sooner=1.0 / (1 + attempt)):
            break
        shutil.rmtree(folder, ignore_errors=True)
    else:
        told.wrong.append(f"never killed: {kind}")
    for _ in range(rng.choice((0, 0, 1, 2))):
        again = _possible(rng.choice(KINDS), run, rng)
        _killed(nursery, run, folder, desk, told, kind=again, rng=rng, sooner=0.7)
    newest = _newest(folder)
    end = nursery.run(Job(variant=run.variant, desk=str(desk), folder=str(folder)))
    if end.result is None:
        told.wrong.append(f"it could not be resumed, code {end.code}: {end.said[-2000:]}")
    else:
        told.wrong += [name for name, value in end.result["parts"].items() if value != run.parts[name]]
        if end.result["began"] < newest:
            told.unreadable.append(f"resumed at {end.result['began']} though {newest} was there")
    if "damaged" in end.said:
        told.unreadable.append(end.said)
    shutil.rmtree(folder, ignore_errors=True)
    return told


def _killed(
    nursery: Nursery,
    run: Whole,
    folder: Path,
    desk: Path,
    told: Told,
    *,
    kind: str,
    rng: random.Random,
    sooner: float,
) -> bool:
    """False when it ended before the moment came."""
    kind = _possible(kind, run, rng)
    if kind == BY_THE_CLOCK:
        after = rng.uniform(0.0, run.seconds * sooner)
        job = Job(variant=run.variant, desk=str(desk), folder=str(folder), kill_after_s=after)
    else:
        moment = Moment(kind, rng.randint(1, max(1, int(run.counts[kind] * sooner))))
        job = Job(variant=run.variant, desk=str(desk), folder=str(folder), moments=(moment,))
    end = nursery.run(job)
    if end.code == 0:
        return False
    if end.code != -signal.SIGKILL:
        told.wrong.append(f"it ended by itself, code {end.code}: {end.said[-2000:]}")
        return True
    told.kills.append(kind)
    told.half_written += any((folder / "checkpoints").glob(".*.new"))
    told.unreadable += _unreadable(folder)
    told.from_the_start += _newest(folder) == 0
    return True


def _possible(kind: str, run: Whole, rng: random.Random) -> str:
    """Another one where a program never gets there."""
    while kind != BY_THE_CLOCK and not run.counts.get(kind):
        kind = rng.choice(KINDS)
    return kind


def _newest(folder: Path) -> int:
    """The step to resume at: of the newest that has its name, or had it a moment ago."""
    names = [path.name.lstrip(".") for path in (folder / "checkpoints").glob("step-*")]
    names += [path.name.lstrip(".") for path in (folder / "checkpoints").glob(".step-*.old")]
    return max((int(name[5:13]) for name in names), default=0)


def _unreadable(folder: Path) -> list[str]:
    """Checkpoints that have their name and are not whole."""
    found = []
    for path in (folder / "checkpoints").glob("step-*"):
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            found.append(str(error))
    return found
