"""What is remembered of a run, so that causes can be ranked at any time."""

from collections.abc import Mapping
from typing import Any, final

from steadystep.diagnosis.causes import Cause
from steadystep.diagnosis.curve import Curve
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.layers import Layers
from steadystep.diagnosis.opinion import Opinion
from steadystep.diagnosis.ranking import rank
from steadystep.diagnosis.tally import Tally
from steadystep.diagnosis.trace import Trace
from steadystep.records import Diagnosis, Finding, InputStats, Signals

_GRAVE = ("act", "critical")
_SHORTEST = 32  # updates: nothing is concluded about a run of fewer


@final
class Casebook:
    """Sees every step; memory is bounded whatever the length of the run.

    >>> casebook = Casebook()
    >>> for step in range(100):
    ...     casebook.note(Signals(step=step, loss=1 / (1 + step), grad_norm=1.0), Diagnosis(), stepped=True)
    >>> [diagnosis.cause for diagnosis in casebook.diagnose()]
    ['healthy']
    """

    def __init__(self) -> None:
        self._trace = Trace()
        self._layers = Layers()
        self._inputs: InputStats | None = None
        self._scaled = False
        self._incidents: dict[str, Tally] = {}
        self._warned: dict[str, Tally] = {}
        self._noted: dict[str, Tally] = {}
        self._opinion = Opinion()
        self.opposed = False
        """Another network learns against this one, or with it, and its loss depends on that one's weights."""

    def note(self, signals: Signals, diagnosis: Diagnosis, *, stepped: bool) -> None:
        """One attempt: what was measured, what it was taken for, and whether the weights were updated."""
        if stepped and self._trace.due() and signals.healthy:
            self._trace.add(signals.step, signals.loss, signals.grad_norm, signals.lr)
            self._scaled = signals.scaled
        if diagnosis.findings:
            self._book(diagnosis)
        if signals.probe is not None:
            self._layers.add(signals.probe)
        if signals.inputs is not None:
            self._inputs = signals.inputs

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Causes for the run so far, the likeliest first; one diagnosis "healthy" when there is none."""
        return rank(self.facts())

    def volunteers(self, step: int) -> Diagnosis | None:
        """What is believed by now and has not been said; None at nearly every step."""
        return self._opinion.formed(step, self.diagnose)

    def verdict(self) -> Diagnosis | None:
        """What the run comes to, at its end; None for one that is too short to tell."""
        return self.diagnose()[0] if self._trace.num_updates >= _SHORTEST else None

    def facts(self) -> Facts:
        """What the ranking goes by."""
        return Facts(
            trace=self._trace,
            curve=Curve.read(self._trace.first, self._trace.losses),
            incidents=self._incidents,
            warned=self._warned,
            noted=self._noted,
            ratios=tuple(self._layers.ratios),
            highest_ratio=self._layers.highest,
            first_probe=self._layers.first,
            probe=self._layers.last,
            inputs=self._inputs,
            scaled=self._scaled,
            opposed=self.opposed,
        )

    def _book(self, diagnosis: Diagnosis) -> None:
        grave = [finding for finding in diagnosis.findings if finding.severity in _GRAVE]
        if not grave and diagnosis.cause == Cause.DATA_SHIFT:
            grave = [finding for finding in diagnosis.findings if finding.severity == "warn"]
        if grave:
            _count(self._incidents, diagnosis.cause, grave[0])
        for finding in diagnosis.findings:
            _count(self._noted if finding.severity == "info" else self._warned, finding.detector, finding)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "trace": self._trace.state_dict(),
            "layers": self._layers.state_dict(),
            "inputs": None if self._inputs is None else self._inputs.to_json(),
            "scaled": self._scaled,
            "incidents": _save(self._incidents),
            "warned": _save(self._warned),
            "noted": _save(self._noted),
            "opinion": self._opinion.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._trace.load_state_dict(state["trace"])
        self._layers.load_state_dict(state["layers"])
        self._inputs = None if state["inputs"] is None else InputStats.from_json(state["inputs"])
        self._scaled = bool(state["scaled"])
        self._incidents, self._warned = _load(state["incidents"]), _load(state["warned"])
        self._noted = _load(state["noted"])
        if "opinion" in state:
            self._opinion.load_state_dict(state["opinion"])


def _count(tallies: dict[str, Tally], name: str, finding: Finding) -> None:
    tally = tallies.get(name)
    if tally is None:
        tally = tallies[name] = Tally(finding.step)
    tally.add(finding)


def _save(tallies: dict[str, Tally]) -> dict[str, Any]:
    return {name: tally.state_dict() for name, tally in tallies.items()}


def _load(state: Mapping[str, Any]) -> dict[str, Tally]:
    return {str(name): Tally.from_state(saved) for name, saved in state.items()}
