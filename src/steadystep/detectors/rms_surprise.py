"""Gradients that Adam's second moment did not expect: RMS_t of each tensor against its own median.

Loss spikes follow such a surprise by a few steps (Wortsman et al. 2023); a limit for all tensors alike would alarm on
some and never on others.
"""

import math
from typing import Any, final

from steadystep.detectors.tensor_history import TensorHistory
from steadystep.records import Finding, Signals

_LIMIT = 6.0
_FLOOR = 2.3  # StableAdamW's own mark; once the data is learnt, gradients are tiny and any wrong example is a surprise
_SHARE = 0.25
_QUIET_STEPS = 32


@final
class RmsSurprise:
    """Notes when a quarter of the tensors are six times as surprised as usual."""

    name = "rms-surprise"
    only_probes = True

    def __init__(self) -> None:
        self._usual = TensorHistory()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one note for each probe."""
        probe = signals.probe
        if probe is None or not probe.surprises or probe.step <= _QUIET_STEPS:
            return ()
        judged, where, largest = 0, [], 0.0
        for name, value in zip(probe.names, probe.surprises, strict=False):
            usual = self._usual.median(name)
            if usual > 0.0 and not math.isnan(value):
                judged += 1
                if value > max(_LIMIT * usual, _FLOOR):
                    where.append(name)
                    largest = max(largest, value / usual)
            self._usual.learn(name, value)  # a median of eight bears three outliers
        if not where or len(where) < _SHARE * judged:
            return ()
        what = f"gradients are up to {largest:.0f} times what Adam's second moment expects, against the usual"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=largest,
                limit=_LIMIT,
                what=what,
                where=tuple(where),
                since=probe.step,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return self._usual.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._usual.load_state_dict(state)
