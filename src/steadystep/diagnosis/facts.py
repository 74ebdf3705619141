"""All that is known about a run, in the form that rules ask for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Self, final

from steadystep.diagnosis.measured import Measured, is_bias
from steadystep.records import ActionName, Finding, InputStats, Plan, Probe, Structure
from steadystep.stats import DIFFERENCE_SIGMA

_MOST_NAMES = 64
_NAMED = 3  # names listed before "and N more"

if TYPE_CHECKING:
    from steadystep.diagnosis.run_history import Trace


_BLOCKS = 8
_FEWEST = 32  # points
# Above ten the logarithms lie so close together that any level would be near one.
_MOST_CLASSES = 10
_COMMON_CLASSES = (100, 1000)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """A loss curve in a few numbers. Levels are medians of eighths of the run."""

    start: float
    """The first loss or the median of the first few, whichever is lower: a run may explode within a few steps."""
    best: float
    late: float
    """The last eighth."""
    noise: float
    """Sigma between neighbouring points of the second half; a trend does not widen it."""
    settled: bool
    """The second half shows no trend."""
    lowest: float
    highest: float

    @classmethod
    def read(cls, first: Sequence[float], losses: Sequence[float]) -> Self | None:
        """None for a curve too short to say anything."""
        if len(losses) < _FEWEST:
            return None
        size = len(losses) / _BLOCKS
        levels = [median(losses[round(i * size) : round((i + 1) * size)]) for i in range(_BLOCKS)]
        half = losses[len(losses) // 2 :]
        noise = median(abs(b - a) for a, b in pairwise(half)) / DIFFERENCE_SIGMA
        middle, late = sum(levels[4:6]) / 2, sum(levels[6:]) / 2
        return cls(
            start=min(first[0], median(first)),
            best=min(levels),
            late=levels[-1],
            noise=noise,
            settled=abs(late - middle) <= max(3.0 * noise / math.sqrt(size), 0.005 * abs(late)),
            lowest=min(losses),
            highest=max(losses),
        )

    @property
    def learned(self) -> bool:
        """It has been lower than at the start by more than half its noise, and by more than one per cent."""
        return self.start - self.best > max(0.5 * self.noise, 0.01 * abs(self.start))

    @property
    def near_best(self) -> bool:
        """It is about as low as it has ever been."""
        return self.late - self.best <= max(2.0 * self.noise, 0.05 * abs(self.best), 0.05 * (self.start - self.best))

    @property
    def rose(self) -> bool:
        """It is well above where it began."""
        return self.late - self.start > max(3.0 * self.noise, 0.1 * abs(self.start))


def guessing(level: float, *, precision: float) -> int | None:
    """The number of classes, up to ten or a common one, whose guessing costs about `level` nats."""
    if not 0.5 < level < 8.0:
        return None
    classes = round(math.exp(level))
    if classes > _MOST_CLASSES:
        classes = min(_COMMON_CLASSES, key=lambda common: abs(level - math.log(common)))
    excess = level - math.log(classes)
    return classes if -precision <= excess <= 0.006 * level + precision else None


@final
class Occurrences:
    """How often, when, how bad, where. Names beyond the first 64 are not counted."""

    __slots__ = ("count", "first", "last", "names", "what", "worst")

    def __init__(self, first: int) -> None:
        self.count = 0
        self.first = self.last = first
        self.worst: float | None = None
        self.what = ""
        """The clause of the worst finding."""
        self.names: dict[str, int] = {}

    def add(self, finding: Finding) -> None:
        """One more finding."""
        self.count += 1
        self.last = finding.step
        if self.worst is None or (math.isfinite(finding.value) and finding.value > self.worst):
            self.what = finding.what
            self.worst = finding.value if math.isfinite(finding.value) else None
        for name in finding.where:
            if name in self.names or len(self.names) < _MOST_NAMES:
                self.names[name] = self.names.get(name, 0) + 1

    @property
    def where(self) -> tuple[str, ...]:
        """The names, the most frequent first."""
        return tuple(sorted(self.names, key=lambda name: -self.names[name]))

    @property
    def when(self) -> str:
        """In words."""
        if self.count == 1:
            return f"at step {self.first}"
        return f"{self.count} times between steps {self.first} and {self.last}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "count": self.count,
            "first": self.first,
            "last": self.last,
            "worst": self.worst,
            "what": self.what,
            "names": dict(self.names),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The seen that `state_dict` describes."""
        seen = cls(int(state["first"]))
        seen.count, seen.last = int(state["count"]), int(state["last"])
        seen.worst = None if state["worst"] is None else float(state["worst"])
        seen.what = str(state["what"])
        seen.names = {str(name): int(count) for name, count in state["names"].items()}
        return seen


@final
class Interventions:
    """What the guard did about one cause: the last plan that was carried out, and all actions so far."""

    __slots__ = ("actions", "plan")

    def __init__(self, plan: Plan, actions: Sequence[ActionName] = ()) -> None:
        self.plan, self.actions = plan, list(actions)
        self.add(plan)

    def add(self, plan: Plan) -> None:
        """One more plan."""
        self.plan = plan
        self.actions += [action for action in plan.actions if action not in self.actions]

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"plan": self.plan.to_json(), "actions": list(self.actions)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """What `state_dict` describes."""
        return cls(Plan.from_json(state["plan"]), state["actions"])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is known about how a run is set up. The defaults say: nothing."""

    precision: str = ""
    """fp32, bf16 or fp16; empty where it is unknown, as in the log of another tool."""
    clips: bool = False
    warms_up: bool = False
    gives_batch: bool = False
    writes_bundles: bool = False


UNKNOWN_SETUP = Setup()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One run so far."""

    trace: "Trace"
    curve: LossCurve | None
    """None while the run is too short to be read."""
    incidents: Mapping[str, Occurrences]
    """Steps that asked for action, by cause."""
    warned: Mapping[str, Occurrences]
    """Findings of severity warn or more, by detector."""
    noted: Mapping[str, Occurrences]
    """Findings of severity info, by detector."""
    ratios: tuple[float, ...]
    """Update-to-weight ratio over the run."""
    highest_ratio: float
    """The largest of any tensor that is not a bias."""
    first_probe: Probe | None
    probe: Probe | None
    """The last one."""
    inputs: InputStats | None
    scaled: bool
    done: "Mapping[str, Interventions]" = field(default_factory=dict)
    """What the guard did about incidents, by cause."""
    setup: Setup = UNKNOWN_SETUP
    opposed: bool = False
    """Another network learns in turns with this one: a loss that stands still is a balance."""
    measured: Measured = field(default_factory=Measured)
    """What batches, outputs and parameters have shown."""
    structure: Structure = field(default_factory=Structure)
    """Which parameters are trained and how."""

    @property
    def going_well(self) -> bool:
        """Something was learned and not lost again: what happened on the way has healed."""
        return self.curve is not None and self.curve.learned and self.curve.near_best

    @property
    def signed(self) -> bool:
        """Losses below zero, as with policy gradients: then their level means little."""
        return min(self.trace.losses, default=0.0) < 0.0

    @property
    def ratio(self) -> float | None:
        """The usual update-to-weight ratio of the second half of the run."""
        return median(self.ratios[len(self.ratios) // 2 :]) if self.ratios else None

    @property
    def idle_share(self) -> float:
        """Share of the later half of the updates whose gradient was exactly zero."""
        late = self.trace.norms[len(self.trace.norms) // 2 :]
        return sum(norm == 0.0 for norm in late) / len(late) if late else 0.0

    @property
    def done_share(self) -> float:
        """Share of the later half of the updates whose loss was exactly zero as well."""
        half = len(self.trace.norms) // 2
        late = list(zip(self.trace.norms[half:], self.trace.losses[half:], strict=True))
        return sum(norm == 0.0 == loss for norm, loss in late) / len(late) if late else 0.0

    @property
    def stuck_at_zero(self) -> tuple[str, ...]:
        """Weights, biases aside, that are all zero and that an update left so."""
        probe = self.probe
        if probe is None:
            return ()
        columns = zip(probe.names, probe.weight_rms, probe.update_rms, strict=False)
        return tuple(n for n, weight, update in columns if weight == 0.0 == update and not is_bias(n))

    @property
    def weights(self) -> tuple[str, ...]:
        """Tensors the last probe looked at, biases aside."""
        return () if self.probe is None else tuple(n for n in self.probe.names if not is_bias(n))

    def weights_above(self, rms: float) -> tuple[str, ...]:
        """Weights that were larger than this before the first update, else at the first probe, biases aside."""
        initial, probe = self.measured.initial, self.first_probe
        if initial is not None:
            sizes = zip(initial.names, initial.rms, strict=False)
        elif probe is not None:
            sizes = zip(probe.names, probe.weight_rms, strict=False)
        else:
            return ()
        return tuple(n for n, size in sizes if size > rms and not is_bias(n))

    @property
    def peak(self) -> tuple[float, int]:
        """The highest loss and its step."""
        return (-math.inf if self.trace.peak is None else self.trace.peak), self.trace.peak_step


def sentence(finding: Finding) -> str:
    """One finding as one clause."""
    what = finding.what or f"{finding.detector}: {finding.value:.3g}, limit {finding.limit:.3g}"
    return f"{what} ({names(finding.where)})" if finding.where else what


def told(seen: Occurrences) -> str:
    """What was found over a run, where, and when."""
    where = f" ({names(seen.where)})" if seen.names else ""
    return f"{seen.what}{where}, {seen.when}"


def names(where: Sequence[str]) -> str:
    """The first few names, and how many more."""
    rest = len(where) - _NAMED
    return ", ".join(where[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
