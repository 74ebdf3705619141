"""One line of a scorecard."""

import io
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from steadystep._utils.numbers import or_null

if TYPE_CHECKING:
    from rich.table import Table

    from steadystep.faults.scorecard import Scorecard


FaultResult = Literal["harmless", "saved", "limited", "lost", "harmed", "not applicable"]
"""harmless: it came through alone. saved: only with a guard. limited: not even then, but the guard kept more than half
of the damage away. lost: it did not. harmed: it would have done better without."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one run ended."""

    score: float
    finite: bool
    """All weights and buffers are."""
    stopped: str = ""
    """Why it ended before its last step."""
    did: Mapping[str, int] = field(default_factory=dict)
    """What the guard did, and at how many steps."""
    cause: str = ""
    """What the guard named first, from the fault on."""
    said: str = ""
    """Its evidence for that."""
    alarms_before: int = 0
    """Steps before the fault at which it raised its voice."""

    def as_well_as(self, clean: "End", tolerance: float) -> bool:
        """It reached its last step with finite weights and a score that is no worse, within the tolerance."""
        limit = clean.score + tolerance * abs(clean.score)
        return self.finite and not self.stopped and math.isfinite(self.score) and self.score <= limit

    def harm(self, clean: "End") -> float:
        """How much worse than without the fault."""
        return self.score - clean.score if self.finite and math.isfinite(self.score) else math.inf

    def ratio(self, clean: "End") -> float:
        """Its score over that of the run without a fault; NaN where there is none to speak of."""
        return self.score / clean.score if clean.score > 0 else math.nan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScorecardRow:
    """One fault: three runs for each seed."""

    spec: Mapping[str, Any]
    label: str
    tolerance: float
    clean: tuple[End, ...] = ()
    unguarded: tuple[End, ...] = ()
    guarded: tuple[End, ...] = ()
    why_not: str = ""
    """Why this training cannot have this fault."""

    @property
    def survived_unguarded(self) -> int:
        """Seeds at which the run came through without a guard."""
        return sum(a.as_well_as(b, self.tolerance) for a, b in zip(self.unguarded, self.clean, strict=True))

    @property
    def survived_guarded(self) -> int:
        """Seeds at which it came through with one."""
        return sum(a.as_well_as(b, self.tolerance) for a, b in zip(self.guarded, self.clean, strict=True))

    @property
    def verdict(self) -> FaultResult:
        """Over all seeds: "harmed" when the guard came through fewer of them than the run alone."""
        if self.why_not:
            return "not applicable"
        if self.survived_guarded < self.survived_unguarded:
            return "harmed"
        if self.survived_unguarded == len(self.clean):
            return "harmless"
        if self.survived_guarded == len(self.clean):
            return "saved"
        return "limited" if self._limited else "lost"

    @property
    def _limited(self) -> bool:
        guarded, alone = (
            [end.harm(clean) for end, clean in zip(ends, self.clean, strict=True)]
            for ends in (self.guarded, self.unguarded)
        )
        stopped = any(end.stopped for end in self.guarded)
        return not stopped and sum(guarded) < 0.5 * sum(alone)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is not finite is None."""
        runs = {"clean": self.clean, "unguarded": self.unguarded, "guarded": self.guarded}
        return {
            "fault": self.label,
            "spec": {key: or_null(value) for key, value in self.spec.items()},
            "verdict": self.verdict,
            "why_not": self.why_not,
            "survived_unguarded": self.survived_unguarded,
            "survived_guarded": self.survived_guarded,
            **{
                name: [_end_as_dict(end, clean) for end, clean in zip(ends, self.clean, strict=True)]
                for name, ends in runs.items()
            },
        }


def _end_as_dict(end: End, clean: End) -> dict[str, Any]:
    return {
        "score": or_null(end.score),
        "ratio": or_null(end.ratio(clean)),
        "finite": end.finite,
        "stopped": end.stopped,
        "did": dict(end.did),
        "cause": end.cause,
        "said": end.said,
        "alarms_before": end.alarms_before,
    }


_COLOURS = {
    "harmless": "dim",
    "saved": "green",
    "limited": "yellow",
    "lost": "red",
    "harmed": "bold red",
    "not applicable": "dim",
}
_WIDTH = 130


def table(card: "Scorecard") -> "Table":
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
        console.print(table(card))
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
