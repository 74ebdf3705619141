"""The scorecard: a training broken in many ways, with a guard and without."""

import io
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from steadystep._utils.text import nearest_names
from steadystep.config import Config
from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.faults.kinds import KINDS, Declaration, declared
from steadystep.faults.scorecard_run import End, ScorecardRow, run

if TYPE_CHECKING:
    from rich.table import Table


SCORECARD_TRIALS: tuple[Mapping[str, Any], ...] = (
    {"kind": "grad-scale", "factor": 10},
    {"kind": "grad-scale", "factor": 10_000},
    {"kind": "grad-scale", "factor": 10, "for": "ever"},
    {"kind": "grad-sign-flip", "for": 20},
    {"kind": "bad-gradient"},
    {"kind": "bad-gradient", "value": "inf"},
    {"kind": "missing-zero-grad", "for": 20},
    {"kind": "fp16-overflow", "for": 3},
    {"kind": "fp16-underflow", "for": 20},
    {"kind": "bad-weight"},
    {"kind": "bit-flip"},
    {"kind": "bit-flip", "bit": "mantissa"},
    {"kind": "bit-flip", "target": "matmul", "transient": True},
    {"kind": "frozen-layer", "for": "ever"},
    {"kind": "zeroed-layer"},
    {"kind": "dead-relus"},
    {"kind": "moments-scale", "factor": 0},
    {"kind": "moments-scale", "factor": 1000},
    {"kind": "lr-scale", "factor": 100, "for": 20},
    {"kind": "lr-scale", "factor": 30, "for": "ever"},
    {"kind": "lr-creep", "growth": 1.05},
    {"kind": "bad-loss", "for": 5},
    {"kind": "loss-drift", "per_step": 0.01},
    {"kind": "bad-input"},
    {"kind": "data-scale", "factor": 1e6},
    {"kind": "data-constant", "for": 20},
    {"kind": "shuffled-labels", "for": 20},
    {"kind": "stale-batch", "for": 20},
)


def trials(kinds: Sequence[str | Mapping[str, Any]] | None, *, at: int) -> list[dict[str, Any]]:
    """Declarations ready for `parse`: all, those of some kinds, or the user's own."""
    wanted: list[Mapping[str, Any]] = [] if kinds is not None else list(SCORECARD_TRIALS)
    for kind in kinds or ():
        if isinstance(kind, Mapping):
            wanted.append(kind)
        elif kind in KINDS:
            wanted += [trial for trial in SCORECARD_TRIALS if trial["kind"] == kind]
        else:
            raise ConfigError(f"kinds: {kind!r} is unknown{nearest_names(str(kind), list(KINDS), count=1)}")
    return [{"kind": trial.get("kind"), "at": at} | dict(trial) for trial in wanted]


def label(spec: Mapping[str, Any]) -> str:
    """A declaration in few words.

    >>> label({"kind": "grad-scale", "at": 200, "factor": 10, "for": 5})
    'grad-scale factor=10 for 5'
    """
    own = [f"{key}={_short(value)}" for key, value in spec.items() if key not in ("kind", "at", "for", "steps")]
    lasts = spec.get("for", spec.get("steps"))
    return " ".join([str(spec["kind"]), *own, *([] if lasts is None else [f"for {lasts}"])])


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


OnProgress = Callable[[int, int, str], None]
"""Called before each run: how many are done, how many there are, and which comes now."""

MIN_STEPS = 90  # the fault comes after two thirds: detectors need 32 steps before it, a remembered state 20 more


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scorecard:
    """Which faults a training survives. Print it, or call `as_dict()`."""

    rows: tuple[ScorecardRow, ...]
    """One row per fault."""
    steps: int
    """Length of each run."""
    at: int
    """The step of the fault."""
    seeds: tuple[int, ...]
    """Seeds that each fault was run with."""
    tolerance: float
    """How much worse than the fault-free run still counts as survived."""

    @property
    def verdicts(self) -> dict[str, int]:
        """Number of faults by verdict."""
        return dict(Counter(row.verdict for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Return the card as a dictionary, ready for JSON."""
        told = {"steps": self.steps, "at": self.at, "seeds": list(self.seeds), "tolerance": self.tolerance}
        return told | {"verdicts": self.verdicts, "rows": [row.as_dict() for row in self.rows]}

    def table(self) -> "Table":
        """Return a table for a rich console."""
        return scorecard_table(self)

    def __str__(self) -> str:
        return text(self)


def scorecard(
    factory: Callable[[int], Any],
    *,
    steps: int = 300,
    kinds: Sequence[str | Mapping[str, Any]] | None = None,
    seeds: Sequence[int] = (0,),
    config: Config | Mapping[str, Any] | str | Path | None = None,
    tolerance: float = 0.1,
    progress: OnProgress | None = None,
) -> Scorecard:
    """Inject every kind of fault into a training, with and without a guard, and compare with the fault-free run.

    Args:
        factory: makes the training from a seed: an object with `model`, `optimizer`, `batches(step)`, `loss(batch)`
            and, optionally, `score()` (held out; lower is better) and `after_step()`.
        steps: length of each run. The fault comes after two thirds of them.
        kinds: some of `KINDS`, or declarations as for `parse`, where `at` may be left out. Default: all.
        seeds: each fault is run with each of them.
        config: settings of the guard. Runs without a guard have the same precision, clipping and schedule.
        tolerance: how much worse than the fault-free run still counts as survived.
        progress: called before each run.
    """
    settings, at = Config.load(config), steps * 2 // 3
    if steps < MIN_STEPS:
        raise ConfigError(f"steps = {steps}: expected at least {MIN_STEPS}: a guard needs a baseline before the fault")
    if not seeds:
        raise ConfigError("seeds: expected at least one")
    specs = trials(kinds, at=at)
    say = _Count(progress, len(seeds) * (1 + 2 * len(specs)))
    declarations = [_declared(spec, steps) for spec in specs]
    one = partial(run, factory, steps=steps)
    looking = settings.model_copy(update={"mode": "observe"})
    clean = []
    for seed in seeds:
        say(f"no fault, seed {seed}")
        clean.append(one(seed, config=looking))

    def row(spec: Mapping[str, Any], declaration: Declaration) -> ScorecardRow:
        known = partial(ScorecardRow, spec=spec, label=label(spec), tolerance=tolerance)
        unguarded, guarded = list[End](), list[End]()
        try:
            for seed in seeds:
                for ends, mode in ((unguarded, looking), (guarded, settings)):
                    say(f"{label(spec)}, seed {seed}, {'unguarded' if mode is looking else 'guarded'}")
                    ends.append(one(seed, config=mode, declaration=declaration))
        except (MisuseError, UnsupportedError) as reason:
            return known(why_not=str(reason))
        return known(clean=tuple(clean), unguarded=tuple(unguarded), guarded=tuple(guarded))

    return Scorecard(
        rows=tuple(map(row, specs, declarations)), steps=steps, at=at, seeds=tuple(seeds), tolerance=tolerance
    )


def _declared(spec: Mapping[str, Any], steps: int) -> Declaration:
    """One that is wrong or comes too late is a mistake of the whole card."""
    declaration = declared(spec, where="kinds")
    if declaration.when.first >= steps:
        raise ConfigError(f"kinds.at = {spec['at']!r}: there are only {steps} steps")
    return declaration


@final
class _Count:
    """Tells how far it is."""

    def __init__(self, tell: OnProgress | None, total: int) -> None:
        self._tell, self._done, self._total = tell, 0, total

    def __call__(self, what: str) -> None:
        if self._tell is not None:
            self._tell(self._done, self._total, what)
        self._done += 1


_WIDTH = 130
_COLOURS = {
    "harmless": "dim",
    "saved": "green",
    "limited": "yellow",
    "lost": "red",
    "harmed": "bold red",
    "not applicable": "dim",
}


def scorecard_table(card: "Scorecard") -> "Table":
    """One line per fault; scores are over that of the run without a fault."""
    from rich.table import Table  # why here: its import draws from Python's random numbers

    made = Table(title=_title(card), title_justify="left", caption=_caption(card), caption_justify="left")
    made.add_column("fault")
    made.add_column("verdict")
    made.add_column("unguarded", justify="right")
    made.add_column("guarded", justify="right")
    made.add_column("interventions")
    made.add_column("diagnosis")
    for row in card.rows:
        colour = _COLOURS[row.verdict]
        verdict = f"[{colour}]{row.verdict}[/{colour}]"
        if row.why_not:
            made.add_row(row.label, verdict, "", "", "", row.why_not)
        else:
            made.add_row(row.label, verdict, _ends(row, row.unguarded), _ends(row, row.guarded), _did(row), _said(row))
    return made


def text(card: "Scorecard") -> str:
    """The table without colours."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(scorecard_table(card))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _title(card: "Scorecard") -> str:
    seeds = ", ".join(str(seed) for seed in card.seeds)
    return f"{card.steps} steps, fault from step {card.at}, seed{'s' * (len(card.seeds) > 1)} {seeds}"


def _caption(card: "Scorecard") -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in card.verdicts.items())
    return (
        f"{counts}. Scores are relative to the run without a fault; up to {1 + card.tolerance:.2f} counts as survived."
    )


def _ends(row: ScorecardRow, ends: Sequence[End]) -> str:
    told = [_end_as_text(end, clean) for end, clean in zip(ends, row.clean, strict=True)]
    if len(ends) == 1:
        return told[0]
    ratios = [end.ratio(clean) for end, clean in zip(ends, row.clean, strict=True)]
    survived = sum(end.as_well_as(clean, row.tolerance) for end, clean in zip(ends, row.clean, strict=True))
    middle = statistics.median(ratio if math.isfinite(ratio) else math.inf for ratio in ratios)
    return f"{survived}/{len(ends)} {_number(middle)}"


def _end_as_text(end: End, clean: End) -> str:
    ratio = end.ratio(clean)
    if not end.finite:
        return "NaN"
    shown = _number(ratio) if not math.isnan(ratio) else _number(end.score)
    return f"{shown} (stopped)" if end.stopped else shown


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1e}"


def _did(row: ScorecardRow) -> str:
    total: Counter[str] = Counter()
    for end in row.guarded:
        total.update(end.did)
    return ", ".join(f"{what} x{count}" if count > 1 else what for what, count in total.items()) or "nothing"


def _said(row: ScorecardRow) -> str:
    causes = Counter(end.cause for end in row.guarded if end.cause)
    return ", ".join(cause for cause, _ in causes.most_common()) or "nothing"
