"""What a detector is."""

from typing import Any, Protocol

from steadystep.records import Finding, Signals


class Detector(Protocol):
    """Sees every step's signals in order, before the update, and says what it noticed.

    The state is plain JSON; a detector that is saved and loaded continues as if never interrupted. One that has an
    attribute `only_probes = True` does nothing at steps without a probe, and is not asked there.
    """

    name: str

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Findings about this step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...


def sees_every_step(detector: Detector) -> bool:
    """Whether it is asked at steps without a probe too."""
    return not getattr(detector, "only_probes", False)
