"""Embedding rows that grow without end: what attention multiplies with itself leaves every range."""

from typing import Any, final

from steadystep.detectors.growth import Growth
from steadystep.records import Finding, Signals

# Four times the first rows of torch's N(0, 1) at a width of 256; narrower or smaller beginnings have further to go.
_FLOOR = 64.0


@final
class EmbeddingGrowth:
    """Warns once for each embedding table whose longest row has outgrown its beginnings and still grows."""

    name = "embedding-growth"
    only_probes = True

    def __init__(self) -> None:
        self._growth = Growth(self.name, floor=_FLOOR, say=_said)

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all tables that have just proved to grow."""
        probe = signals.probe
        if probe is None:
            return ()
        return self._growth.findings(signals.step, probe.tables, probe.row_norms)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return self._growth.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._growth.load_state_dict(state)


def _said(norm: float, began: float) -> str:
    return f"an embedding's longest row has a norm of {norm:.3g} and grows; at first {began:.3g}"
