"""A warm-up that ends before Adam's second moment has settled: about 2 / (1 - beta2) steps (Ma and Yarats 2019)."""

from typing import Any, final

from steadystep.records import Finding, Signals

_RISE = 2.0  # from its first value to its top: less is no warm-up


@final
class ShortWarmup:
    """Notes it once, when the learning rate has stopped rising. A run without any warm-up is left alone."""

    name = "short-warmup"

    def __init__(self, *, beta2: float) -> None:
        self._needed = 2.0 / (1.0 - beta2)
        self._first: float | None = None
        self._last = 0.0
        self._steps = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding at the first step that is no higher than the one before."""
        lr = signals.lr
        if self._done or not 0.0 <= lr < float("inf"):
            return ()
        if self._first is None:
            self._first = self._last = lr
            return ()
        self._steps += 1
        if lr > self._last:
            self._last = lr
            return ()
        self._done = True
        if self._last < _RISE * self._first or self._steps <= 1 or self._steps >= self._needed:
            return ()
        what = f"the warm-up took {self._steps - 1} steps; Adam's second moment settles in about {self._needed:.0f}"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=float(self._steps - 1),
                limit=self._needed,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"first": self._first, "last": self._last, "steps": self._steps, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._last, self._steps, self._done = float(state["last"]), int(state["steps"]), bool(state["done"])
