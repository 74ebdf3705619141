"""Columns of numbers as they stand in a log become a Run: roles given, steps in order, restarts told apart.

What a column or a tag is about is guessed from its name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError
from steadystep.runs.levels import in_order
from steadystep.runs.run import Run, Series, Source, StepUnit, counted_on

Role = Literal["step", "loss", "grad_norm", "lr", "val_loss"]
ROLES: tuple[Role, ...] = ("step", "loss", "grad_norm", "lr", "val_loss")

_HELD_OUT = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"}
_TRAINING = {"train", "training", "tr"}
STEPS = (
    *("step", "_step", "global_step", "trainer_global_step", "train_global_step", "iteration", "iter", "iters"),
    *("train_step", "training_step", "optimizer_step", "current_step", "global_steps", "iter_num", "train_iter"),
    *("steps", "num_updates", "update", "updates", "n_updates", "total_timesteps", "timesteps", "num_timesteps"),
    *("num_steps", "it", "batch", "batch_idx", "samples", "tokens"),
)
"""Names of a count of steps, the surest first."""
_LOSS_WORDS = {"loss", "losses", "nll", "cross", "xent", "ce", "mse", "objective", "cost"}
_NOT_LOSS = {"scale", "scaler", "aux", "scaling", "weight", "ema", "min", "max", "std", "best", "delta"}
_NOT_LOSS |= {"time", "ppl", "perplexity", "coeff", "coef", "threshold", "norm", "lr", "tokens", "sec", "ms"}
_PLAIN = {"step", "total", "mean", "avg", "batch", "iter", "lm", "run", "raw", "loss", "average"}
_HIGHER_IS_BETTER = {"acc", "accuracy", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "reward", "r2"}
_HIGHER_IS_BETTER |= {"score", "iou", "map", "dice", "psnr", "ssim", "winrate", "return", "top1", "top5"}


@lru_cache(maxsize=4096)
def name_words(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case.

    >>> name_words("Loss/train"), name_words("trainGradNorm")
    (('loss', 'train'), ('train', 'grad', 'norm'))
    """
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return tuple(word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word)


def is_held_out(name: str) -> bool:
    """Measured at a validation."""
    return bool(_HELD_OUT.intersection(name_words(name)))


def is_split(name: str) -> bool:
    """The name of a part of the data and nothing else: train, val and the like."""
    return name.lower() in _HELD_OUT or name.lower() in _TRAINING


def is_loss(name: str) -> bool:
    """A loss, of the training or of a validation."""
    return _is_loss(set(name_words(name)))


def higher_is_better(name: str) -> bool:
    """An accuracy, a reward or the like."""
    return bool(_HIGHER_IS_BETTER.intersection(name_words(name)))


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
    plain = "_".join(name_words(name))
    if plain in STEPS or name.lower() in STEPS:
        return 100.0 - (STEPS.index(plain) if plain in STEPS else 1)
    return 1.0 if plain == "epoch" or plain.endswith("global_step") else 0.0


def _is_loss(found: set[str]) -> bool:
    return bool(_LOSS_WORDS & found) and not _NOT_LOSS & found


def _loss_score(name: str) -> float:
    listed = name_words(name)
    found = set(listed)
    if not _is_loss(found) or _HELD_OUT & found:
        return 0.0
    rest = found - _TRAINING - _PLAIN
    score = 50.0 + 20.0 * ("loss" in found) + 5.0 * (found == {"loss"}) + 4.0 * bool(found & _TRAINING)
    score -= 3.0 * ("epoch" in found) + 4.0 * len(rest - {"epoch"})
    return max(score + 2.0 * ("total" in found), 1.0)


def _val_score(name: str) -> float:
    found = set(name_words(name))
    if not _is_loss(found) or not _HELD_OUT & found:
        return 0.0
    first = {"test"} & found
    rest = found - _HELD_OUT - _PLAIN
    return max(50.0 + 20.0 * ("loss" in found) - 5.0 * bool(first) - 4.0 * len(rest), 1.0)


def _norm_score(name: str) -> float:
    listed = name_words(name)
    found = set(listed)
    if found & {"param", "params", "weight", "layer", "layers", "update"}:
        return 0.0
    if found & {"gnorm", "gradnorm"} or ("norm" in found and found & {"grad", "grads", "gradient", "gradients"}):
        return 50.0 - len(found) + 3.0 * bool(found & {"total", "global"}) - 2.0 * bool(found & {"clipped", "after"})
    return 10.0 if listed in {("norm",), ("total", "norm")} else 0.0


def _lr_score(name: str) -> float:
    found = set(name_words(name))
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


def role_of(name: str) -> Role | None:
    """The role that a name alone suggests; None for a plain metric."""
    return next((role for role, score in _SCORES.items() if score(name) > 0.0), None)


def choose_columns(names: Iterable[str], asked: Mapping[str, str]) -> dict[Role, str]:
    """The guess, with what the user said instead where they said something."""
    found = guess([name for name in names if name not in asked.values()])
    return {**found, **{role: asked[role] for role in ROLES if role in asked}}


_LARGEST_STEP = 2.0**53
_EMPTY = 0.5  # share of NaN from which on it may mean "not logged"
_ALTERNATIONS = 3
_EPOCH_ROWS = 0.3  # epochs per row: a row stands for an epoch, or for a phase of one

Floats = NDArray[np.float64]


@final
@dataclass(slots=True)
class LogTable:
    """Named columns; each has the rows it was logged in and its values there."""

    columns: dict[str, tuple[NDArray[np.int64], Floats]] = field(default_factory=dict)
    rows: int = 0
    notes: list[str] = field(default_factory=list)
    has_steps: bool = True
    steps: Floats | None = None
    """The step of every row, where no single column holds it; NaN where there is none."""
    step_name: str = ""
    whole: float | None = None
    """The length of the progress bar that the steps were read from."""


def to_run(table: LogTable, *, name: str, path: Path, source: Source, asked: Mapping[str, str]) -> Run:
    """The run in a table; ConfigError when there is no curve in it."""
    check_roles(asked)
    _check_columns(table, path, asked)
    roles, notes = choose_columns(table.columns, asked), list(table.notes)
    steps, unit = _row_steps(table, roles, asked, notes)
    restarts: set[int] = set()

    def series(column: str) -> Series:
        rows, values = _without_blanks(*table.columns[column])
        known = np.isfinite(steps[rows])
        ordered = in_order(steps[rows[known]].astype(np.int64), values[known])
        restarts.update(ordered.restarts)
        notes.extend(f"{column}: {note}" for note in ordered.notes)
        return ordered.series

    main: dict[str, Any] = {role: series(roles[role]) for role in ("loss", "grad_norm", "lr") if role in roles}
    begun = set(restarts)
    others = {column: series(column) for column in table.columns if column not in roles.values()}
    validation = {column: curve for column, curve in others.items() if is_held_out(column)}
    if "val_loss" in roles:
        validation["val_loss"] = series(roles["val_loss"])
    if "loss" not in main and "val_loss" not in validation and not any(map(higher_is_better, others)):
        some = ", ".join(repr(column) for column in list(table.columns)[:8])
        raise ConfigError(f"{path}: which column is the loss? --column loss=NAME, where NAME is one of {some}")
    if also := [repr(column) for column in others if is_loss(column) and column not in validation]:
        notes.append(f"other losses: {', '.join(also[:5])}; --column loss=NAME reads another")
    read = _read_as(table, roles, list(others), asked)
    return Run(
        name=name,
        path=path,
        source=source,
        metrics={column: curve for column, curve in others.items() if column not in validation},
        validation=validation,
        restarts=tuple(sorted(begun)),
        notes=(read, *dict.fromkeys(notes)),
        columns={str(role): column for role, column in roles.items()},
        read=read,
        step_unit=unit,
        **main,
    )


def _read_as(table: LogTable, roles: Mapping[Role, str], others: Sequence[str], asked: Mapping[str, str]) -> str:
    read = f"read {table.rows:,} rows: {', '.join(f'{role}={name}' for role, name in roles.items())}"
    equal = [column for column in others if "loss" in roles and _loss_score(column) == _loss_score(roles["loss"])]
    return (
        f"{read}; also a loss: {', '.join(equal[:3])} (--column loss=NAME)" if equal and "loss" not in asked else read
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


def _row_steps(
    table: LogTable, roles: dict[Role, str], asked: Mapping[str, str], notes: list[str]
) -> tuple[Floats, StepUnit]:
    """The step of every row, NaN where it cannot be used; `roles` is told what was read as the step."""
    column = roles.pop("step", None)
    epochs = _epochs(table)
    steps = np.full(table.rows, np.nan)
    if table.steps is not None and "step" not in asked:
        steps, name = table.steps.copy(), table.step_name
    elif column is None or column.lower() == "epoch":
        if table.has_steps:
            notes.append("no step column found: rows are counted instead")
        counts_epochs = epochs is not None and len(np.unique(epochs)) > _EPOCH_ROWS * table.rows
        return np.arange(table.rows, dtype=np.float64), "epoch" if counts_epochs else "row"
    else:
        name, (rows, values) = column, table.columns[column]
        steps[rows] = values
    steps[~(np.abs(steps) < _LARGEST_STEP)] = np.nan
    lost = int(np.isnan(steps).sum())
    if lost == table.rows:
        raise ConfigError(f"the column {name!r} contains no steps; choose another with --column step=NAME")
    if lost:
        notes.append(f"{lost} rows without a step were skipped")
    on = counted_on(steps, epochs, table.whole)
    if on is not None:
        notes.append("steps start again in every epoch and are counted on")
    named: dict[Role, str] = {"step": name, **roles}
    roles.clear()
    roles.update(named)
    return steps if on is None else on, "step"


def _epochs(table: LogTable) -> Floats | None:
    """The epoch of every row, carried on from the row before."""
    column = next((name for name in table.columns if name_words(name) == ("epoch",)), None)
    if column is None:
        return None
    rows, values = table.columns[column]
    place = np.searchsorted(rows, np.arange(table.rows), side="right") - 1
    return np.where(place >= 0, values[np.maximum(place, 0)], values[0])


def _without_blanks(rows: NDArray[np.int64], values: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Without NaN, where NaN again and again stands between numbers: such a column was logged less often than others.

    A loss that has become NaN stays so, or is so once or twice; it does not come and go by the hundred.
    """
    blank = np.isnan(values)
    returns = int(np.count_nonzero(blank[:-1] & ~blank[1:])) if len(blank) else 0
    if returns < _ALTERNATIONS or blank.mean() < _EMPTY:
        return rows, values
    return rows[~blank], values[~blank]
