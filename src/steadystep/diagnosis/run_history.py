"""What is remembered of a run, so that causes can be ranked at any time."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, final

from steadystep.diagnosis.candidates import with_candidates
from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.facts import UNKNOWN_SETUP, Facts, Interventions, LossCurve, Occurrences, Setup
from steadystep.diagnosis.measured import Layers, Measured
from steadystep.diagnosis.ranking import rank
from steadystep.records import GRAVE, Diagnosis, Finding, InputStats, Plan, Signals, Structure

_FIRST = 64
_SLOW = frozenset({Cause.NO_LEARNING, Cause.LEARNING_RATE_TOO_LOW, Cause.SUSPICIOUS_PERFECTION, Cause.BATCH_SIZE_UNFIT})
_PATIENCE = 1000  # steps: before, a run that seems to stand still may only not have begun to learn


@final
class Opinion:
    """Asks `diagnose` at a cadence, and remembers what was said."""

    def __init__(self) -> None:
        self._next = _FIRST
        self._last = ""
        self._told: set[str] = set()

    def formed(self, step: int, diagnose: Callable[[], tuple[Diagnosis, ...]]) -> Diagnosis | None:
        """What to say at `step`, if anything; nearly always one comparison."""
        if step < self._next:
            return None
        while self._next <= step:
            power = 1 << (self._next.bit_length() - 1)
            self._next = power * 3 // 2 if self._next == power else 2 * power
        first = diagnose()[0]
        before, self._last = self._last, first.cause
        if first.cause in (Cause.HEALTHY, Cause.UNKNOWN) or first.cause != before or first.cause in self._told:
            return None
        if first.cause in _SLOW and step < _PATIENCE:
            return None
        self._told.add(first.cause)
        return first

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"next": self._next, "last": self._last, "told": sorted(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._next, self._last = int(state["next"]), str(state["last"])
        self._told = {str(cause) for cause in state["told"]}


_NOTHING = Plan()
_WARMUP = 4  # points of the learning rate: one that rises over all of them is warmed up
_SHORTEST = 32  # updates: nothing is concluded about a run of fewer
_FIRST_LOSSES = 8
_FIRST_NORMS = 16
_MOST_POINTS = 512


@final
class Trace:
    """Loss, gradient norm and learning rate of every n-th update; n doubles whenever the points become too many.

    Points are single steps, not means: how far they scatter is evidence too. The first losses and norms are kept
    apart, and so is the highest loss of all points ever kept.
    """

    __slots__ = ("_mask", "_seen", "first", "first_norms", "losses", "lrs", "norms", "peak", "peak_step", "steps")

    def __init__(self) -> None:
        self._mask = 0
        self._seen = 0
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.lrs: list[float] = []
        self.first: list[float] = []
        self.first_norms: list[float] = []
        self.peak: float | None = None
        self.peak_step = 0

    def due(self) -> bool:
        """Counts one update; true when it is one to `add`."""
        seen = self._seen
        self._seen = seen + 1
        return not seen & self._mask

    def add(self, step: int, loss: float, norm: float, lr: float) -> None:
        """One point, of finite numbers."""
        self.steps.append(step)
        self.losses.append(loss)
        self.norms.append(norm)
        self.lrs.append(lr)
        if len(self.first) < _FIRST_LOSSES:
            self.first.append(loss)
        if len(self.first_norms) < _FIRST_NORMS:
            self.first_norms.append(norm)
        if self.peak is None or loss > self.peak:
            self.peak, self.peak_step = loss, step
        if len(self.steps) == _MOST_POINTS:
            for column in (self.steps, self.losses, self.norms, self.lrs):
                del column[1::2]
            self._mask = 2 * self._mask + 1

    @property
    def num_updates(self) -> int:
        """Updates counted, those between the points included."""
        return self._seen

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "every": self._mask + 1,
            "seen": self._seen,
            "steps": list(self.steps),
            "losses": list(self.losses),
            "norms": list(self.norms),
            "lrs": list(self.lrs),
            "first": list(self.first),
            "first_norms": list(self.first_norms),
            "peak": self.peak,
            "peak_step": self.peak_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._mask, self._seen = int(state["every"]) - 1, int(state["seen"])
        self.steps = [int(step) for step in state["steps"]]
        self.losses, self.norms = _floats(state["losses"]), _floats(state["norms"])
        self.lrs, self.first = _floats(state["lrs"]), _floats(state["first"])
        self.first_norms = _floats(state["first_norms"])
        self.peak = None if state["peak"] is None else float(state["peak"])
        self.peak_step = int(state["peak_step"])


def _floats(values: list[Any]) -> list[float]:
    return [float(value) for value in values]


@final
class RunHistory:
    """Collects evidence over a run; memory is bounded whatever its length.

    Args:
        setup: what is known of the settings of the run, so that advice leaves out what is set.
        structure: returns which parameters are trained and how; called by `facts`.

    >>> history = RunHistory()
    >>> for step in range(100):
    ...     history.note(Signals(step=step, loss=1 / (1 + step), grad_norm=1.0), Diagnosis(), stepped=True)
    >>> [diagnosis.cause for diagnosis in history.diagnose()]
    ['healthy']
    """

    def __init__(self, setup: Setup = UNKNOWN_SETUP, structure: Callable[[], Structure] = Structure) -> None:
        self._setup = setup
        self._structure = structure
        self._measured = Measured()
        self.loop = self._measured.loop
        """What happens between updates; whoever sees it writes it down here."""
        self._trace = Trace()
        self._layers = Layers()
        self._inputs: InputStats | None = None
        self._scaled = False
        self._incidents: dict[str, Occurrences] = {}
        self._warned: dict[str, Occurrences] = {}
        self._noted: dict[str, Occurrences] = {}
        self._done: dict[str, Interventions] = {}
        self._opinion = Opinion()
        self.opposed = False
        """Whether the loss depends on another network that learns at the same time, as in a GAN."""

    def note(self, signals: Signals, diagnosis: Diagnosis, *, stepped: bool, plan: Plan = _NOTHING) -> None:
        """Record one attempt: what was measured and diagnosed, what was done, and whether the weights were updated."""
        if stepped and self._trace.due() and signals.all_finite:
            self._trace.add(signals.step, signals.loss, signals.grad_norm, signals.lr)
            self._scaled = signals.scaled
        if diagnosis.findings:
            self._book(diagnosis)
            if plan.actions:
                self._intervened(diagnosis.cause, plan)
        if signals.probe is not None:
            self._layers.add(signals.probe)
        if signals.inputs is not None:
            self._inputs = signals.inputs
        measured = self._measured
        rare = signals.probe or signals.outputs or signals.batch
        if signals.names is not measured.done or rare is not None:
            measured.add(signals, stepped=stepped)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return the causes for the run so far, the most likely first; one "healthy" if there is none."""
        return with_candidates(rank(facts := self.facts()), facts)

    def volunteers(self, step: int) -> Diagnosis | None:
        """Return a new diagnosis that has not been reported yet; None at nearly every step."""
        return self._opinion.formed(step, lambda: rank(self.facts(), live=True))

    def verdict(self) -> Diagnosis | None:
        """Return the final diagnosis of the run; None for a run that is too short."""
        return self.diagnose()[0] if self._trace.num_updates >= _SHORTEST else None

    def start_again(self) -> None:
        """The loop has put other weights in: what the loss was before says nothing about them."""
        self._trace = Trace()

    def facts(self) -> Facts:
        """Return the numbers that the ranking of causes uses."""
        return Facts(
            trace=self._trace,
            curve=LossCurve.read(self._trace.first, self._trace.losses),
            incidents=self._incidents,
            warned=self._warned,
            noted=self._noted,
            ratios=tuple(self._layers.ratios),
            highest_ratio=self._layers.highest,
            first_probe=self._layers.first,
            probe=self._layers.last,
            inputs=self._inputs,
            scaled=self._scaled,
            done=self._done,
            setup=self._known_setup(),
            opposed=self.opposed,
            measured=self._measured,
            structure=self._structure(),
        )

    def _known_setup(self) -> Setup:
        """The settings, and what the run has shown since."""
        lrs = self._trace.lrs[:_WARMUP]
        rises = len(lrs) == _WARMUP and all(a < b for a, b in pairwise(lrs))
        return replace(
            self._setup,
            precision="fp16" if self._scaled else self._setup.precision,
            warms_up=self._setup.warms_up or rises,
            gives_batch=self._setup.gives_batch or self._inputs is not None,
        )

    def _intervened(self, cause: str, plan: Plan) -> None:
        if cause in self._done:
            self._done[cause].add(plan)
        else:
            self._done[cause] = Interventions(plan)

    def _book(self, diagnosis: Diagnosis) -> None:
        grave = [finding for finding in diagnosis.findings if finding.severity in GRAVE]
        if not grave and diagnosis.cause == Cause.DATA_SHIFT:
            grave = [finding for finding in diagnosis.findings if finding.severity == "warn"]
        if grave:
            _count(self._incidents, diagnosis.cause, grave[0])
        for finding in diagnosis.findings:
            _count(self._noted if finding.severity == "info" else self._warned, finding.detector, finding)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "trace": self._trace.state_dict(),
            "layers": self._layers.state_dict(),
            "inputs": None if self._inputs is None else self._inputs.to_json(),
            "scaled": self._scaled,
            "incidents": _save(self._incidents),
            "warned": _save(self._warned),
            "noted": _save(self._noted),
            "opinion": self._opinion.state_dict(),
            "done": {cause: done.state_dict() for cause, done in self._done.items()},
            "measured": self._measured.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._trace.load_state_dict(state["trace"])
        self._layers.load_state_dict(state["layers"])
        self._inputs = None if state["inputs"] is None else InputStats.from_json(state["inputs"])
        self._scaled = bool(state["scaled"])
        self._incidents, self._warned = _load(state["incidents"]), _load(state["warned"])
        self._noted = _load(state["noted"])
        self._done = {str(cause): Interventions.from_state(done) for cause, done in state.get("done", {}).items()}
        if state.get("measured") is not None:
            self._measured.load_state_dict(state["measured"])
        if "opinion" in state:
            self._opinion.load_state_dict(state["opinion"])


def _count(occurrences: dict[str, Occurrences], name: str, finding: Finding) -> None:
    seen = occurrences.get(name)
    if seen is None:
        seen = occurrences[name] = Occurrences(finding.step)
    seen.add(finding)


def _save(occurrences: dict[str, Occurrences]) -> dict[str, Any]:
    return {name: seen.state_dict() for name, seen in occurrences.items()}


def _load(state: Mapping[str, Any]) -> dict[str, Occurrences]:
    return {str(name): Occurrences.from_state(saved) for name, saved in state.items()}
