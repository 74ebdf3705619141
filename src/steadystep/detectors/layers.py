"""Units that put out nothing for any example of a batch: no gradient will ever wake them."""

import math
from statistics import median_low
from typing import Any, final

from steadystep.detectors.detector import Runs
from steadystep.records import Finding, Probe, Signals

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
        """One finding for all activations that have just proved dead."""
        probe = signals.probe
        if probe is None or not probe.dead or probe.step <= _QUIET_STEPS:
            return ()
        shares = dict(zip(probe.modules, probe.dead, strict=False))
        where = self._runs.add({name: share > _LIMIT for name, share in shares.items()})
        return _warning(self.name, signals.step, shares, where, "the units of an activation are zero for whole batches")

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
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
        """A note when three probes in a row agree, once until the ratio comes back."""
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
            return (self._finding(signals, ratio, _HIGH, "updates are large against the weights they change"),)
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
        """JSON-ready state."""
        return {"above": self._above, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._above, self._below = int(state["above"]), int(state["below"])


def _ratio(probe: Probe) -> float | None:
    pairs = zip(probe.update_rms, probe.weight_rms, strict=False)
    ratios = [u / w for u, w in pairs if _ZERO < w < math.inf and u < math.inf]
    return median_low(ratios) if ratios else None
