"""Single layers, as probes see them: sizes that grow and do not stop, units that are dead, updates of a wrong size."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from statistics import median_low
from typing import Any, final

from steadystep.detectors.detector import Runs
from steadystep.records import Finding, Probe, Signals
from steadystep.stats import Window


@final
class TensorHistory:
    """The last `size` values of each name. What is not finite is not learned."""

    def __init__(self, size: int = 8, *, armed_after: int = 4) -> None:
        self._size = size
        self._armed_after = armed_after
        self._windows: dict[str, Window] = {}

    def median(self, name: str) -> float:
        """The usual value; NaN until enough were seen."""
        window = self._windows.get(name)
        return window.median if window is not None and len(window) >= self._armed_after else math.nan

    def last(self, name: str) -> float:
        """The newest value; NaN where there is none."""
        window = self._windows.get(name)
        return window.values()[-1] if window is not None and len(window) else math.nan

    def learn(self, name: str, value: float) -> None:
        """One more value."""
        if math.isfinite(value):
            self._windows.setdefault(name, Window(self._size)).push(value)

    def forget(self, name: str) -> None:
        """Begin again with this one."""
        self._windows.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {name: window.state_dict() for name, window in self._windows.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._windows = {name: Window(self._size, map(float, values)) for name, values in state.items()}


_FACTOR = 4.0
_PROBES = 4
_PATIENCE = 3


class Growth(ABC):
    """Follows one size per name, from probe to probe.

    A size is of concern above `floor`, above four times the median of its first four probes, and while it is still
    rising: above the median of its last four. Each name is told once, after three such probes in a row. What is not
    finite is passed over: it is another detector's.
    """

    name: str
    only_probes = True
    floor: float
    """Below this no size is of concern."""
    what: str
    """One clause with places for the size and what it was at first."""

    def __init__(self) -> None:
        self._first = TensorHistory(_PROBES, armed_after=_PROBES)
        self._last = TensorHistory(_PROBES, armed_after=_PROBES)
        self._runs = Runs(_PATIENCE)

    @abstractmethod
    def _sizes(self, probe: Probe) -> Iterable[tuple[str, float]]: ...

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all that have just proved to grow; the largest size is its value."""
        if signals.probe is None:
            return ()
        sizes = dict(self._sizes(signals.probe))
        where = self._add(sizes)
        if not where:
            return ()
        worst = max(where, key=sizes.__getitem__)
        began = self._began(worst)
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=sizes[worst],
                limit=self._limit(worst),
                what=self.what.format(sizes[worst], began),
                where=where,
                baseline=began,
            ),
        )

    def _add(self, sizes: Mapping[str, float]) -> tuple[str, ...]:
        concerns = {}
        for name, size in sizes.items():
            if not math.isfinite(size):
                continue
            if math.isnan(self._began(name)):
                self._first.learn(name, size)
            else:
                concerns[name] = size > self._limit(name) and size > self._last.median(name)
            self._last.learn(name, size)
        return self._runs.add(concerns)

    def _began(self, name: str) -> float:
        """NaN until enough was seen."""
        return self._first.median(name)

    def _limit(self, name: str) -> float:
        return max(self.floor, _FACTOR * self._began(name))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"first": self._first.state_dict(), "last": self._last.state_dict(), "runs": self._runs.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first.load_state_dict(state["first"])
        self._last.load_state_dict(state["last"])
        self._runs.load_state_dict(state["runs"])


@final
class EmbeddingGrowth(Growth):
    """Warns once for each embedding table whose longest row has outgrown its start and still grows."""

    name = "embedding-growth"
    # Four times the first rows of torch's N(0, 1) at a width of 256; narrower or smaller beginnings have further to go.
    floor = 64.0
    what = "the longest embedding row has norm {:.3g} and keeps growing; it began at {:.3g}"

    def _sizes(self, probe: Probe) -> Iterable[tuple[str, float]]:
        return zip(probe.tables, probe.row_norms, strict=False)


@final
class AttentionLogitGrowth(Growth):
    """Warns once for each attention module whose bound on its logits has outgrown its start and still rises."""

    name = "attention-logit-growth"
    # From here on neighbouring bf16 numbers are 1 apart, a factor e of attention. Small healthy GPTs stay below 64,
    # those with a learning rate that costs them half a nat pass 200, and QK-clip (Kimi Team 2025) begins at a true
    # logit of 100.
    floor = 128.0
    what = "attention logits reach up to {:.3g} and keep growing; they began at {:.3g}"

    def _sizes(self, probe: Probe) -> Iterable[tuple[str, float]]:
        return zip(probe.attentions, probe.logit_bounds, strict=False)


_LIMIT = 0.7
_QUIET_STEPS = 4  # the first probes follow each other too closely to count as lasting


@final
class DeadUnits:
    """Warns once for each activation that has more than 70 % dead units in three probes in a row."""

    name = "dead-units"
    only_probes = True

    def __init__(self) -> None:
        self._runs = Runs(3)

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all activations that were just confirmed dead."""
        probe = signals.probe
        if probe is None or not probe.dead or probe.step <= _QUIET_STEPS:
            return ()
        shares = dict(zip(probe.modules, probe.dead, strict=False))
        where = self._runs.add({name: share > _LIMIT for name, share in shares.items()})
        return _warning(self.name, signals.step, shares, where, "units of an activation output zero for whole batches")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return self._runs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._runs.load_state_dict(state)


def _warning(
    detector: str, step: int, shares: dict[str, float], where: tuple[str, ...], of_what: str
) -> tuple[Finding, ...]:
    if not where:
        return ()
    worst = max(shares[name] for name in where)
    what = f"up to {worst:.0%} of {of_what}"
    return (Finding(detector=detector, step=step, severity="warn", value=worst, limit=_LIMIT, what=what, where=where),)


_HIGH, _LOW = 0.1, 1e-6
_RATIO_PATIENCE = 3  # probes
_RATIO_QUIET_STEPS = 64  # the first updates of Adam are large against small weights
_ZERO = 1e-8  # a weight tensor below this has not begun: any update is large against it


@final
class UpdateRatio:
    """Notes when the median over all tensors of update RMS over weight RMS stays far too high or too low."""

    name = "update-ratio"
    only_probes = True

    def __init__(self) -> None:
        self._above = 0
        self._below = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a note when three probes in a row agree, once until the ratio comes back."""
        probe = signals.probe
        if probe is None or probe.step <= _RATIO_QUIET_STEPS:
            return ()
        ratio = _ratio(probe)
        if ratio is None:
            return ()
        learns = 0.0 < signals.lr < math.inf
        self._above = self._above + 1 if ratio > _HIGH else 0
        self._below = self._below + 1 if ratio < _LOW and learns else 0
        if self._above == _RATIO_PATIENCE:
            return (self._finding(signals, ratio, _HIGH, "updates are large relative to the weights"),)
        if self._below == _RATIO_PATIENCE:
            return (self._finding(signals, ratio, _LOW, "updates are too small to change the weights"),)
        return ()

    def _finding(self, signals: Signals, ratio: float, limit: float, what: str) -> Finding:
        return Finding(
            detector=self.name,
            step=signals.step,
            severity="info",
            value=ratio,
            limit=limit,
            what=f"{what} ({ratio:.1e})",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"above": self._above, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._above, self._below = int(state["above"]), int(state["below"])


def _ratio(probe: Probe) -> float | None:
    pairs = zip(probe.update_rms, probe.weight_rms, strict=False)
    ratios = [u / w for u, w in pairs if _ZERO < w < math.inf and u < math.inf]
    return median_low(ratios) if ratios else None
