"""Attention logits that grow without end: softmax becomes a maximum, and its gradient nothing.

Runs have diverged after that (Dehghani et al. 2023, Wortsman et al. 2023).
"""

from typing import Any, final

from steadystep.detectors.growth import Growth
from steadystep.records import Finding, Signals

# From here on neighbouring bf16 numbers are 1 apart, a factor e of attention. Small healthy GPTs stay below 64, those
# with a learning rate that costs them half a nat pass 200, and QK-clip (Kimi Team 2025) begins at a true logit of 100.
_FLOOR = 128.0


@final
class AttentionLogitGrowth:
    """Warns once for each attention module whose bound on its logits has outgrown its beginnings and still rises."""

    name = "attention-logit-growth"
    only_probes = True

    def __init__(self) -> None:
        self._growth = Growth(self.name, floor=_FLOOR, say=_said)

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all modules that have just proved to grow."""
        probe = signals.probe
        if probe is None:
            return ()
        return self._growth.findings(signals.step, probe.attentions, probe.logit_bounds)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return self._growth.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._growth.load_state_dict(state)


def _said(bound: float, began: float) -> str:
    return f"attention logits may be as large as {bound:.3g} and grow; at first {began:.3g}"
