"""What batches, outputs and parameters have shown over a run, in a few numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from steadystep.records import BatchStats, OutputStats, Signals, Structure, WeightStats

_MATCH = 2e-3  # of the loss: the loss function is found out by its value
_SUM = 1e-3
_OFTEN = 64  # steps at which parameters without a gradient are looked for, at the start
_SELDOM = 16


@final
class OutputTrail:
    """Outputs at all probes so far: the first, the last, and what was true of every one."""

    __slots__ = ("count", "evaluating", "first", "highest", "last", "lowest", "matches", "simplex")

    def __init__(self) -> None:
        self.count = 0
        self.first: OutputStats | None = None
        self.last: OutputStats | None = None
        self.matches: dict[str, int] = {}
        """How often each common loss was that of the step."""
        self.simplex = [0, 0]
        """How often the rows were probabilities, and how often the columns."""
        self.evaluating = 0
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, outputs: OutputStats, loss: float) -> None:
        """One more probe, and the loss of its step."""
        self.count += 1
        self.first = self.first or outputs
        self.last = outputs
        for name, value in outputs.losses:
            for sign, key in ((1.0, name), (-1.0, f"negative {name}")):
                if abs(sign * value - loss) <= _MATCH * abs(loss):
                    self.matches[key] = self.matches.get(key, 0) + 1
        positive = outputs.smallest >= 0.0 and len(outputs.shape) > 1
        self.simplex[0] += positive and outputs.row_error <= _SUM
        self.simplex[1] += positive and outputs.column_error <= _SUM
        self.evaluating += outputs.evaluating
        self.lowest, self.highest = min(self.lowest, outputs.smallest), max(self.highest, outputs.largest)

    @property
    def loss(self) -> tuple[str, str]:
        """The kind of the loss and the tensor it is of, where one fits nearly every probe; else empty."""
        best = max(self.matches, key=lambda name: self.matches[name], default="")
        if not best or self.count < 3 or self.matches[best] < 0.8 * self.count:
            return "", ""
        kind, _, part = best.partition(" of ")
        return kind, part

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "count": self.count,
            "first": None if self.first is None else self.first.to_json(),
            "last": None if self.last is None else self.last.to_json(),
            "matches": dict(self.matches),
            "simplex": list(self.simplex),
            "evaluating": self.evaluating,
            "range": [self.lowest, self.highest] if self.count and math.isfinite(self.highest - self.lowest) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.count, self.evaluating = int(state["count"]), int(state["evaluating"])
        self.first = None if state["first"] is None else OutputStats.from_json(state["first"])
        self.last = None if state["last"] is None else OutputStats.from_json(state["last"])
        self.matches = {str(name): int(count) for name, count in state["matches"].items()}
        self.simplex = [int(count) for count in state["simplex"]]
        self.lowest, self.highest = state["range"] or (math.inf, -math.inf)


@final
class Measured:
    """Evidence besides the curves; what is measured once is kept, what is measured again is replaced."""

    __slots__ = ("_looks", "batch", "done", "early", "initial", "outputs", "rewarded", "touched", "updated")

    def __init__(self) -> None:
        self.batch: BatchStats | None = None
        self.early: BatchStats | None = None
        """The first one."""
        self.initial: WeightStats | None = None
        self.outputs = OutputTrail()
        self.touched: set[str] = set()
        """Parameters that have had a gradient."""
        self.updated: set[str] = set()
        """Parameters that an update at a probe has changed."""
        self.rewarded = False
        """A reward was given with `metrics=`: the level of the loss says little."""
        self._looks = 0
        self.done: Sequence[str] | None = None
        """Names of the last gradients that were looked at."""

    def add(self, signals: Signals, *, stepped: bool) -> None:
        """One attempt; nearly always a few comparisons."""
        if signals.batch is not None:
            self.batch = signals.batch
            if self.early is None:
                self.early = signals.batch
        if signals.outputs is not None and signals.losses:
            self.outputs.add(signals.outputs, signals.losses[-1])
        if signals.initial is not None:
            self.initial = signals.initial
        if signals.metrics and not self.rewarded:
            self.rewarded = any("reward" in name or "return" in name for name in signals.metrics)
        if signals.probe is not None:
            probe = signals.probe
            self.updated.update(n for n, size in zip(probe.names, probe.update_rms, strict=False) if size > 0.0)
        if stepped:
            self._touch(signals.names)

    def _touch(self, names: Sequence[str]) -> None:
        if names is self.done:  # why by identity: it is one tuple while all parameters have gradients
            return
        self._looks += 1
        if self._looks <= _OFTEN or not self._looks % _SELDOM:
            self.touched.update(names)
            self.done = names

    def untouched(self, structure: Structure) -> tuple[str, ...]:
        """Trained parameters that have never had a gradient."""
        return tuple(name for name in structure.trained if name not in self.touched)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "batch": None if self.batch is None else self.batch.to_json(),
            "early": None if self.early is None else self.early.to_json(),
            "initial": None if self.initial is None else self.initial.to_json(),
            "outputs": self.outputs.state_dict(),
            "touched": sorted(self.touched),
            "updated": sorted(self.updated),
            "rewarded": self.rewarded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.batch = None if state["batch"] is None else BatchStats.from_json(state["batch"])
        self.early = None if state["early"] is None else BatchStats.from_json(state["early"])
        self.initial = None if state["initial"] is None else WeightStats.from_json(state["initial"])
        self.outputs.load_state_dict(state["outputs"])
        self.touched, self.updated = set(state["touched"]), set(state["updated"])
        self.rewarded = bool(state["rewarded"])
