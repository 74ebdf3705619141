"""One run, plain and guarded, as one row of JSON."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from steadystep.lab.bench.study import StudyJob
from tests.field import loops
from tests.field.plan import Run
from tests.field.program import End, Notes, Program, ended
from tests.field.tasks import TASKS, Task
from tests.field.verdict import Row, compared, fit, spread_of, verdict

SPREAD_SEEDS = 5
_SHOWN = 20  # acts and warnings kept in a row


def plain_end(run: Run) -> End:
    """The program without steadystep, in the framework of the run's face."""
    return _through(run, None)


def guarded_end(run: Run, notes: Notes | None = None) -> End:
    """The program with steadystep; an error is part of how it ended."""
    return _through(run, Notes() if notes is None else notes)


def row_of(run: Run) -> Row:
    """Run both and compare."""
    began = time.monotonic()
    plain, guarded = plain_end(run), guarded_end(run)
    kind = TASKS[run.task]
    identical = not guarded.error and plain.same_weights(guarded)
    clean = plain if run.fault is None else loops.plain(Program.of(run.clean()))
    spread = _spread(run, clean) if _depends_on_spread(plain.score, guarded.score, clean.score) else 0.0
    row: Row = {
        **_guarded_part(run, guarded),
        "identical": identical,
        "plain_error": plain.error,
        "plain_score": plain.score,
        "clean_score": clean.score,
        "spread": spread,
        "fit": _fit(kind, clean),
    }
    row |= verdict(row)
    row["harm_seeds"] = _worse_again(run, row) if row["harm"] else 0
    return row | {"seconds": round(time.monotonic() - began, 1)}


def alarms_of(run: Run) -> Row:
    """Run the guarded program alone, twice as fast: what it said and did in a healthy run, compared with nothing."""
    assert run.fault is None
    began = time.monotonic()
    guarded = guarded_end(run)
    row = _guarded_part(run, guarded) | {
        "identical": None,
        "plain_score": math.nan,
        "clean_score": guarded.score,
        "spread": math.nan,
        "fit": _fit(TASKS[run.task], guarded) or bool(guarded.error),
        "harm": False,
    }
    silent = not row["warnings"] and not row["acts"] and not row["error"]
    row["ok"] = silent and row["cause"].startswith("healthy")
    return row | {"seconds": round(time.monotonic() - began, 1)}


def _guarded_part(run: Run, guarded: End) -> Row:
    notes = guarded.notes or Notes()
    return {
        **asdict(run),
        "half": run.half,
        "fault_at": run.fault_at if run.fault else None,
        "higher_is_better": TASKS[run.task].higher_is_better,
        "warnings": len(notes.warnings),
        "acts": len(notes.acts),
        "warned": notes.warnings[:_SHOWN],
        "acted": notes.acts[:_SHOWN],
        "error": guarded.error,
        "cause": notes.diagnosed().cause if notes.guards else "",
        "start_score": guarded.start,
        "guarded_score": guarded.score,
    }


def _fit(kind: type[Task], end: End) -> bool:
    return fit(end.score, end.start, higher_is_better=kind.higher_is_better, learning_judged=kind.learning_judged)


def _worse_again(run: Run, row: Row) -> int:
    """In how many of five seeds, the run's own among them, the guarded run ends worse: once may be chance."""
    others = [replace(run, seed=run.seed + 1000 + i) for i in range(1, SPREAD_SEEDS)]
    ends = [(guarded_end(other).score, plain_end(other).score) for other in others]
    sense = {"spread": row["spread"], "higher_is_better": row["higher_is_better"]}
    return 1 + sum(compared(guarded, plain, **sense) == "worse" for guarded, plain in ends)


def made(job: StudyJob) -> Row:
    """The row of one job. Here and not in `__main__`, which a worker process does not import."""
    return row_of(Run(**job.args))


def made_alone(job: StudyJob) -> Row:
    """The row of one job that only counts false alarms."""
    return alarms_of(Run(**job.args))


def _depends_on_spread(*scores: float) -> bool:
    """Two of them are finite and different: whether that is noise takes more seeds to tell."""
    return len({score for score in scores if math.isfinite(score)}) > 1


def _spread(run: Run, clean: End) -> float:
    others = [loops.plain(Program.of(run.clean(run.seed + 1000 + i))).score for i in range(1, SPREAD_SEEDS)]
    return spread_of([clean.score, *others])


def _through(run: Run, notes: Notes | None) -> End:
    with silence():
        program = Program.of(run)
        try:
            return _loop(run.face, notes)(program)
        except Exception as error:
            return ended(program, error=f"{type(error).__name__}: {error}"[:500], notes=notes)


@contextmanager
def silence() -> Iterator[None]:
    """No warnings and no log lines; afterwards everything is as loud as before."""
    loggers = [logging.getLogger(name) for name in ("steadystep", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _loop(face: str, notes: Notes | None) -> Callable[[Program], End]:
    if face in ("guard-closure", "guard-loss", "watch"):
        if notes is None:
            return loops.plain
        watches = loops.watched if face == "watch" else loops.guarded
        return lambda program: watches(program, notes)
    from tests.field import frameworks

    within: dict[str, Callable[[Program, Notes | None], End]] = {
        "trainer": frameworks.in_trainer,
        "lightning": frameworks.in_lightning,
        "accelerate": frameworks.in_accelerate,
    }
    return lambda program: within[face](program, notes)


def for_json(value: Any) -> Any:
    """The same with NaN and infinity as strings: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: for_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
