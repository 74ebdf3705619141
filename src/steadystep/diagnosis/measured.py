"""What batches, outputs and parameters have shown over a run, in a few numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, final

from steadystep.records import BatchStats, OutputStats, Probe, Signals, Structure, WeightStats

_MATCH = 2e-3  # of the loss: the loss function is found out by its value
_SUM = 1e-3
_EXACT = 1e-4  # a further term, as the policy's beside a critic's, shows as more than rounding
_TARGET = "['target']"
_PAIRS = 8
_OFTEN = 64  # steps at which parameters without a gradient are looked for, at the start
_SELDOM = 16


@final
class OutputTrail:
    """Outputs at all probes so far: the first, the last, and what was true of every one."""

    __slots__ = ("count", "evaluating", "first", "highest", "last", "lowest", "matches", "pairs", "simplex", "wrong")

    def __init__(self) -> None:
        self.count = 0
        self.first: OutputStats | None = None
        self.last: OutputStats | None = None
        self.matches: dict[str, int] = {}
        """How often each common loss was that of the step."""
        self.simplex = [0, 0]
        """How often the rows were probabilities, and how often the columns."""
        self.evaluating = 0
        self.pairs: list[tuple[float, float]] = []
        """The loss of the step and the value of the first loss function that was called, at the last probes."""
        self.wrong: dict[str, int] = {}
        """How often each fault was seen in the loss functions called."""
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, outputs: OutputStats, loss: float, *others: float) -> None:
        """One more probe, and the last loss of its step; `others` came before."""
        own = others[0] if others and outputs.first else loss
        outputs = replace(outputs, passes=1 + len(others)) if outputs.first else outputs
        self.count, self.first, self.last = self.count + 1, self.first or outputs, outputs
        for name, value in outputs.losses:
            for sign, key in ((1.0, name), (-1.0, f"negative {name}")):
                if abs(sign * value - loss) <= _MATCH * abs(loss):
                    self.matches[key] = self.matches.get(key, 0) + 1
            if name == f"{outputs.kind} of {_TARGET}":
                self.pairs = [*self.pairs, (own, value)][-_PAIRS:]
        for fault in {fault for fault, _ in outputs.mistakes}:
            self.wrong[fault] = self.wrong.get(fault, 0) + 1
        positive = outputs.smallest >= 0.0 and len(outputs.shape) > 1
        self.simplex[0] += positive and outputs.row_error <= _SUM
        self.simplex[1] += positive and outputs.column_error <= _SUM
        self.evaluating += outputs.evaluating
        self.lowest, self.highest = min(self.lowest, outputs.smallest), max(self.highest, outputs.largest)

    @property
    def loss(self) -> tuple[str, str]:
        """The kind of the loss and the tensor it is of, where one fits nearly every probe; else empty."""
        best = max(self.matches, key=lambda name: self.matches[name], default="")
        if self.count < 3:
            return "", ""
        if best and self.matches[best] >= 0.8 * self.count:
            kind, _, part = best.rpartition(" of ")
            return kind, part
        return (self.last.kind, _TARGET) if self.last is not None and self._factor is not None else ("", "")

    @property
    def scale(self) -> float:
        """What that loss is multiplied with: 1 for a plain one."""
        return self._factor if self._factor is not None and self.loss[1] == _TARGET else 1.0

    @property
    def _factor(self) -> float | None:
        """The loss as a multiple of its only term, where it always is the same one."""
        last = self.last
        return self.multiple if last is not None and last.kind and last.terms == last.passes == 1 else None

    @property
    def multiple(self) -> float | None:
        """The loss as a multiple of its first term."""
        if len(self.pairs) < 3:
            return None
        factors = [loss / value for loss, value in self.pairs if value > 0.0]
        usual = sorted(factors)[len(factors) // 2] if len(factors) == len(self.pairs) else 0.0
        return usual if usual > 0.0 and all(abs(f - usual) <= _EXACT * usual for f in factors) else None

    def mistake(self, fault: str) -> str:
        """The evidence for a fault that the loss functions show, where they do at nearly every probe."""
        if self.last is None or self.wrong.get(fault, 0) < max(0.8 * self.count, 1):
            return ""
        return next((text for name, text in self.last.mistakes if name == fault), "")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "count": self.count,
            "first": None if self.first is None else self.first.to_json(),
            "last": None if self.last is None else self.last.to_json(),
            "matches": dict(self.matches),
            "simplex": list(self.simplex),
            "evaluating": self.evaluating,
            "pairs": [list(pair) for pair in self.pairs if math.isfinite(sum(pair))],
            "wrong": dict(self.wrong),
            "range": [self.lowest, self.highest] if self.count and math.isfinite(self.highest - self.lowest) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.count, self.evaluating = int(state["count"]), int(state["evaluating"])
        self.first = None if state["first"] is None else OutputStats.from_json(state["first"])
        self.last = None if state["last"] is None else OutputStats.from_json(state["last"])
        self.matches = {str(name): int(count) for name, count in state["matches"].items()}
        self.simplex = [int(count) for count in state["simplex"]]
        self.pairs = [(float(a), float(b)) for a, b in state.get("pairs", ())]
        self.wrong = {str(fault): int(count) for fault, count in state.get("wrong", {}).items()}
        self.lowest, self.highest = state["range"] or (math.inf, -math.inf)


@final
@dataclass(slots=True)
class LoopHabits:
    """What happens to gradients and optimizer state between two updates."""

    carried: int = 0
    """Updates whose gradients were still there, unchanged, when the next backward pass began."""
    renewed: int = 0
    """Updates after which they had been cleared by then."""
    emptied: int = 0
    """Updates after which the optimizer lost its moments."""
    turns: int = 0
    """Updates whose parameters with a gradient were all others than those of the update before."""

    @property
    def never_clears(self) -> bool:
        """Gradients of most updates are added to the next ones."""
        return self.carried > max(self.renewed, 4)

    @property
    def clears_often(self) -> bool:
        """After one update of eight at least."""
        return 7 * self.renewed >= self.carried

    @property
    def forgets(self) -> bool:
        """The optimizer begins anew so often that its moments never build up."""
        return self.emptied > max(0.1 * (self.carried + self.renewed), 2.0)


@final
class Measured:
    """Evidence besides the curves; what is measured once is kept, what is measured again is replaced."""

    __slots__ = ("_looks", "batch", "done", "early", "initial", "loop", "outputs", "rewarded", "touched", "updated")

    def __init__(self) -> None:
        self.batch: BatchStats | None = None
        self.early: BatchStats | None = None
        """The first one."""
        self.initial: WeightStats | None = None
        self.loop = LoopHabits()
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
            self.outputs.add(signals.outputs, signals.losses[-1], *signals.losses[:-1])
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
            self.loop.turns += self.done is not None and set(self.done).isdisjoint(names)
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
            "loop": [self.loop.carried, self.loop.renewed, self.loop.emptied, self.loop.turns],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.batch = None if state["batch"] is None else BatchStats.from_json(state["batch"])
        self.early = None if state["early"] is None else BatchStats.from_json(state["early"])
        self.initial = None if state["initial"] is None else WeightStats.from_json(state["initial"])
        self.outputs.load_state_dict(state["outputs"])
        self.touched, self.updated = set(state["touched"]), set(state["updated"])
        self.rewarded = bool(state["rewarded"])
        loop = self.loop  # why in place: a watcher holds it too
        loop.carried, loop.renewed, loop.emptied, loop.turns = (*(state.get("loop") or ()), 0, 0, 0, 0)[:4]


_MOST_PROBES = 128


@final
class Layers:
    """Update-to-weight ratios over the run, and the first and the last probe as they are.

    Biases start at zero and change by their whole size, so they do not count unless there is nothing else.
    """

    __slots__ = ("_stride", "_until", "first", "highest", "last", "ratios")

    def __init__(self) -> None:
        self._stride, self._until = 1, 0
        self.ratios: list[float] = []
        """Median over the tensors, of every n-th probe."""
        self.highest = 0.0
        """The largest ratio of any tensor in those probes."""
        self.first: Probe | None = None
        self.last: Probe | None = None

    def add(self, probe: Probe) -> None:
        """One more probe."""
        self.last = probe
        self.first = self.first or probe
        self._until -= 1
        if self._until > 0:
            return
        self._until = self._stride
        ratios = update_ratios(probe)
        if ratios:
            self.ratios.append(median(ratios))
            self.highest = max(self.highest, *ratios)
        if len(self.ratios) == _MOST_PROBES:
            del self.ratios[1::2]
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "stride": self._stride,
            "until": self._until,
            "ratios": list(self.ratios),
            "highest": self.highest,
            "first": None if self.first is None else self.first.to_json(),
            "last": None if self.last is None else self.last.to_json(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._stride, self._until = int(state["stride"]), int(state["until"])
        self.ratios = [float(ratio) for ratio in state["ratios"]]
        self.highest = float(state["highest"])
        self.first = None if state["first"] is None else Probe.from_json(state["first"])
        self.last = None if state["last"] is None else Probe.from_json(state["last"])


def update_ratios(probe: Probe) -> list[float]:
    """How much of its size each weight changed by; all tensors when there are only biases."""
    found = {}
    for name, weight, update in zip(probe.names, probe.weight_rms, probe.update_rms, strict=False):
        if weight > 0.0 and math.isfinite(update / weight):
            found[name] = update / weight
    return [ratio for name, ratio in found.items() if not is_bias(name)] or list(found.values())


def is_bias(name: str) -> bool:
    """By its name, as torch spells it."""
    return "bias" in name.rpartition(".")[2]
