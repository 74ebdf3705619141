"""A loss too good to be true."""

from typing import Any, final

from steadystep.records import Finding, Signals

_NOTHING: tuple[Finding, ...] = ()
_TINY = 1e-12
_IN_A_ROW = 16
_REAL = 1e-3  # a loss that began above this was measuring something


@final
class SuspiciousPerfection:
    """A note, once, when 16 losses in a row are exactly 0, or below 1e-12 in a run that began above 1e-3.

    The usual reasons: the target leaks into the input, every target is masked, or the loss has been detached from the
    prediction.
    """

    name = "suspicious-perfection"

    def __init__(self) -> None:
        self._first: float | None = None
        self._zeros = 0
        self._tiny = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding in a run; losses that are not finite do not count."""
        if signals.loss > _TINY and self._first is not None:
            if signals.loss - signals.loss == 0.0:
                self._zeros = self._tiny = 0
            return _NOTHING
        return self._look_closer(signals)

    def _look_closer(self, signals: Signals) -> tuple[Finding, ...]:
        loss = signals.loss
        if loss - loss != 0.0:
            return _NOTHING
        if self._first is None:
            self._first = loss
        self._zeros = self._zeros + 1 if loss == 0.0 else 0
        self._tiny = self._tiny + 1 if abs(loss) <= _TINY and self._first > _REAL else 0
        if self._done or max(self._zeros, self._tiny) < _IN_A_ROW:
            return _NOTHING
        self._done = True
        what = (
            f"the loss has been {'exactly 0' if self._zeros >= _IN_A_ROW else f'below {_TINY:g}'} for {_IN_A_ROW} steps"
        )
        return (Finding(detector=self.name, step=signals.step, severity="info", value=loss, limit=_TINY, what=what),)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"first": self._first, "zeros": self._zeros, "tiny": self._tiny, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._zeros, self._tiny, self._done = int(state["zeros"]), int(state["tiny"]), bool(state["done"])
