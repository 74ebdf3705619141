"""What a detector is."""

from typing import Any, Protocol

from steadystep.records import Finding, Signals

_OCCASIONAL = ("metrics", "batch_rms", "buffer_peaks", "odd_replicas")


class Detector(Protocol):
    """Sees every step's signals in order, before the update, and says what it noticed.

    The state is plain JSON; a detector that is saved and loaded continues as if never interrupted. One that has an
    attribute `only_probes = True` does nothing at steps without a probe, and is not asked there; nor is one with
    `needs = "metrics"` (or "batch_rms", "buffer_peaks", "odd_replicas") where that is missing.
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


def occasional(signals: Signals) -> tuple[bool, bool, bool, bool]:
    """Which of the signals that most runs never have are there."""
    has_batch = signals.batch_rms is not None
    return bool(signals.metrics), has_batch, bool(signals.buffer_peaks), bool(signals.odd_replicas)


def has_what_it_needs(detector: Detector, given: tuple[bool, ...]) -> bool:
    """Whether it could say or learn anything from signals of which so much is `given`."""
    needs = getattr(detector, "needs", "")
    return needs not in _OCCASIONAL or given[_OCCASIONAL.index(needs)]
