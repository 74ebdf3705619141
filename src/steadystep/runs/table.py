"""Columns of numbers as they stand in a log become a Run: roles given, steps in order, restarts told apart.

What a column or a tag is about is guessed from its name.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError
from steadystep.runs.run import Run, Series, Source

Role = Literal["step", "loss", "grad_norm", "lr", "val_loss"]
ROLES: tuple[Role, ...] = ("step", "loss", "grad_norm", "lr", "val_loss")

_HELD_OUT = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"}
_TRAINING = {"train", "training", "tr"}
_STEPS = (
    *("step", "_step", "global_step", "trainer_global_step", "train_global_step", "iteration", "iter", "iters"),
    *("steps", "num_updates", "update", "updates", "num_steps", "it", "batch", "batch_idx", "samples", "tokens"),
)
_LOSS_WORDS = {"loss", "nll", "cross", "xent", "ce", "mse", "objective", "cost"}
_NOT_LOSS = {"scale", "scaler", "aux", "scaling", "weight", "ema", "min", "max", "std", "best", "delta"}
_PLAIN = {"step", "total", "mean", "avg", "batch", "iter", "lm", "run", "raw", "loss", "average"}
_HIGHER_IS_BETTER = {"acc", "accuracy", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "reward", "r2"}
_HIGHER_IS_BETTER |= {"score", "iou", "map", "dice", "psnr", "ssim", "winrate", "return", "top1", "top5"}


def words(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case.

    >>> words("Loss/train"), words("trainGradNorm")
    (('loss', 'train'), ('train', 'grad', 'norm'))
    """
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return tuple(word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word)


def is_held_out(name: str) -> bool:
    """Measured at a validation."""
    return bool(_HELD_OUT.intersection(words(name)))


def higher_is_better(name: str) -> bool:
    """An accuracy, a reward or the like."""
    return bool(_HIGHER_IS_BETTER.intersection(words(name)))


def guess(names: Iterable[str]) -> dict[Role, str]:
    """The best name for each role; a role without one is left out.

    >>> guess(["epoch", "Step", "Loss/train", "Loss/validation", "Grad/norm", "LR"])["val_loss"]
    'Loss/validation'
    """
    known = list(names)
    found: dict[Role, str] = {}
    for role, score in _SCORES.items():
        best = max(known, key=score, default="")
        if best and score(best) > 0.0:
            found[role] = best
    return found


def _step_score(name: str) -> float:
    plain = "_".join(words(name))
    if plain in _STEPS or name.lower() in _STEPS:
        return 100.0 - (_STEPS.index(plain) if plain in _STEPS else 1)
    return 1.0 if plain == "epoch" or plain.endswith("global_step") else 0.0


def _is_loss(found: set[str]) -> bool:
    return bool(_LOSS_WORDS & found) and not _NOT_LOSS & found


def _loss_score(name: str) -> float:
    listed = words(name)
    found = set(listed)
    if not _is_loss(found) or _HELD_OUT & found:
        return 0.0
    rest = found - _TRAINING - _PLAIN
    score = 50.0 + 20.0 * ("loss" in found) + 5.0 * (found == {"loss"}) + 4.0 * bool(found & _TRAINING)
    score -= 3.0 * ("epoch" in found) + 4.0 * len(rest - {"epoch"})
    return max(score + 2.0 * ("total" in found), 1.0)


def _val_score(name: str) -> float:
    found = set(words(name))
    if not _is_loss(found) or not _HELD_OUT & found:
        return 0.0
    first = {"test"} & found
    rest = found - _HELD_OUT - _PLAIN
    return max(50.0 + 20.0 * ("loss" in found) - 5.0 * bool(first) - 4.0 * len(rest), 1.0)


def _norm_score(name: str) -> float:
    listed = words(name)
    found = set(listed)
    if found & {"param", "params", "weight", "layer", "layers", "update"}:
        return 0.0
    if found & {"gnorm", "gradnorm"} or ("norm" in found and found & {"grad", "grads", "gradient", "gradients"}):
        return 50.0 - len(found) + 3.0 * bool(found & {"total", "global"}) - 2.0 * bool(found & {"clipped", "after"})
    return 10.0 if listed in {("norm",), ("total", "norm")} else 0.0


def _lr_score(name: str) -> float:
    found = set(words(name))
    if "lr" in found or "learningrate" in found or {"learning", "rate"} <= found:
        return 50.0 - len(found)
    return 0.0


_SCORES: dict[Role, Callable[[str], float]] = {
    "step": _step_score,
    "loss": _loss_score,
    "grad_norm": _norm_score,
    "lr": _lr_score,
    "val_loss": _val_score,
}


def choose(names: Iterable[str], asked: Mapping[str, str]) -> dict[Role, str]:
    """The guess, with what the user said instead where they said something."""
    found = guess([name for name in names if name not in asked.values()])
    return {**found, **{role: asked[role] for role in ROLES if role in asked}}


_SHORT = 0.1  # of the longest part: a last part shorter than this that begins anew is a false start
_UNSORTED = 0.02  # of all points going back: the order of the rows means nothing


@final
@dataclass(frozen=True, slots=True)
class Ordered:
    """A curve with rising steps, where other processes took over, and what was left out."""

    series: Series
    restarts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def in_order(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Ordered:
    """What was written last counts, as it does for the weights: a resumed run writes its last steps again."""
    if len(steps) < 2:
        return Ordered(Series(steps, values))
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    notes: list[str] = []
    restarts: list[int] = []
    if len(back) > max(8, _UNSORTED * len(steps)):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        notes.append("rows were not ordered by step and have been sorted")
    elif len(back):
        steps, values, restarts, notes = _joined(steps, values, back)
    last = np.append(np.diff(steps) > 0, True)
    if not last.all():
        notes.append(f"{int((~last).sum())} steps were logged more than once: the last value is used")
        steps, values = steps[last], values[last]
    return Ordered(Series(steps, values), tuple(restarts), tuple(notes))


def _joined(
    steps: NDArray[np.int64], values: NDArray[np.float64], back: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], list[int], list[str]]:
    bounds = [0, *back.tolist(), len(steps)]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    longest = max(part.stop - part.start for part in parts)
    notes: list[str] = []
    kept: list[slice] = []
    restarts: list[int] = []
    for part in parts:
        first = int(steps[part.start])
        anew = bool(kept) and first <= int(steps[kept[0].start])
        if anew and part.stop - part.start < _SHORT * longest:
            notes.append(f"an aborted start of {part.stop - part.start} points was skipped")
            continue
        if anew:
            notes.append("the file contains several runs: the last one is read")
            kept, restarts = [part], []
            continue
        if kept:
            restarts.append(first)
            kept = [slice(s.start, s.start + int(np.searchsorted(steps[s], first))) for s in kept]
        kept.append(part)
    chosen = np.concatenate([np.arange(s.start, s.stop) for s in kept])
    return steps[chosen], values[chosen], restarts, notes


_LARGEST_STEP = 2.0**53
_EMPTY = 0.5  # share of NaN from which on it may mean "not logged"
_ALTERNATIONS = 3

Floats = NDArray[np.float64]


@final
@dataclass(slots=True)
class LogTable:
    """Named columns; each has the rows it was logged in and its values there."""

    columns: dict[str, tuple[NDArray[np.int64], Floats]] = field(default_factory=dict)
    rows: int = 0
    notes: list[str] = field(default_factory=list)
    has_steps: bool = True


def to_run(table: LogTable, *, name: str, path: Path, source: Source, asked: Mapping[str, str]) -> Run:
    """The run in a table; ConfigError when there is no curve in it."""
    check_roles(asked)
    _check_columns(table, path, asked)
    roles = choose(table.columns, asked)
    notes = list(table.notes)
    steps = _row_steps(table, roles.get("step"), notes)
    taken = set(roles.values())
    restarts: set[int] = set()

    def series(column: str) -> Series:
        rows, values = _without_blanks(*table.columns[column])
        known = np.isfinite(steps[rows])
        ordered = in_order(steps[rows[known]].astype(np.int64), values[known])
        restarts.update(ordered.restarts)
        notes.extend(f"{column}: {note}" for note in ordered.notes)
        return ordered.series

    main = {role: series(roles[role]) for role in ("loss", "grad_norm", "lr") if role in roles}
    begun = set(restarts)
    others = {column: series(column) for column in table.columns if column not in taken}
    validation = {column: curve for column, curve in others.items() if is_held_out(column)}
    if "val_loss" in roles:
        validation["val_loss"] = series(roles["val_loss"])
    if "loss" not in main and "val_loss" not in validation and not any(map(higher_is_better, others)):
        some = ", ".join(repr(column) for column in list(table.columns)[:8])
        raise ConfigError(f"{path}: which column is the loss? --column loss=NAME, where NAME is one of {some}")
    said = ", ".join(f"{role} = {roles[role]!r}" for role in ROLES if role in roles and role not in asked)
    if said:
        notes.insert(0, f"columns were guessed: {said}")
    return Run(
        name=name,
        path=path,
        source=source,
        loss=main.get("loss", Series()),
        grad_norm=main.get("grad_norm", Series()),
        lr=main.get("lr", Series()),
        metrics={column: curve for column, curve in others.items() if column not in validation},
        validation=validation,
        restarts=tuple(sorted(begun)),
        notes=tuple(dict.fromkeys(notes)),
    )


def check_roles(asked: Mapping[str, str]) -> None:
    """ConfigError for a role that does not exist."""
    for role in asked:
        if role not in ROLES:
            raise ConfigError(f"--column {role}=...: a column can be {', '.join(ROLES)}")


def _check_columns(table: LogTable, path: Path, asked: Mapping[str, str]) -> None:
    for role, column in asked.items():
        if column not in table.columns:
            near = nearest_names(column, sorted(table.columns))
            raise ConfigError(f"{path}: --column {role}={column}: no such column{near}")


def _row_steps(table: LogTable, column: str | None, notes: list[str]) -> Floats:
    """The step of every row; NaN where it cannot be used."""
    if column is None or column.lower() == "epoch":
        if table.has_steps:
            notes.append("no step column found: rows are counted instead")
        return np.arange(table.rows, dtype=np.float64)
    steps = np.full(table.rows, np.nan)
    rows, values = table.columns[column]
    steps[rows] = np.where(np.abs(values) < _LARGEST_STEP, values, np.nan)
    lost = int(np.isnan(steps).sum())
    if lost == table.rows:
        raise ConfigError(f"the column {column!r} contains no steps; choose another with --column step=NAME")
    if lost:
        notes.append(f"{lost} rows without a step were skipped")
    return steps


def _without_blanks(rows: NDArray[np.int64], values: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Without NaN, where NaN again and again stands between numbers: such a column was logged less often than others.

    A loss that has become NaN stays so, or is so once or twice; it does not come and go by the hundred.
    """
    blank = np.isnan(values)
    returns = int(np.count_nonzero(blank[:-1] & ~blank[1:])) if len(blank) else 0
    if returns < _ALTERNATIONS or blank.mean() < _EMPTY:
        return rows, values
    return rows[~blank], values[~blank]
