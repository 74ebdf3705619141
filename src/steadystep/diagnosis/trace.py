"""The curves of a whole run in a bounded number of points."""

from typing import Any, final

_MOST = 512
_FIRST = 8
_FIRST_NORMS = 16


@final
class Trace:
    """Loss, gradient norm and learning rate of every n-th update; n doubles whenever the points become too many.

    Points are single steps, not means: how far they scatter is evidence too. The first losses and norms are kept
    apart, and so is the highest loss of all points ever kept.
    """

    __slots__ = ("_mask", "_seen", "first", "first_norms", "losses", "lrs", "norms", "peak", "peak_step", "steps")

    def __init__(self) -> None:
        self._mask = 0
        self._seen = 0
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.lrs: list[float] = []
        self.first: list[float] = []
        self.first_norms: list[float] = []
        self.peak: float | None = None
        self.peak_step = 0

    def due(self) -> bool:
        """Counts one update; true when it is one to `add`."""
        seen = self._seen
        self._seen = seen + 1
        return not seen & self._mask

    def add(self, step: int, loss: float, norm: float, lr: float) -> None:
        """One point, of finite numbers."""
        self.steps.append(step)
        self.losses.append(loss)
        self.norms.append(norm)
        self.lrs.append(lr)
        if len(self.first) < _FIRST:
            self.first.append(loss)
        if len(self.first_norms) < _FIRST_NORMS:
            self.first_norms.append(norm)
        if self.peak is None or loss > self.peak:
            self.peak, self.peak_step = loss, step
        if len(self.steps) == _MOST:
            for column in (self.steps, self.losses, self.norms, self.lrs):
                del column[1::2]
            self._mask = 2 * self._mask + 1

    @property
    def num_updates(self) -> int:
        """Updates counted, those between the points included."""
        return self._seen

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "every": self._mask + 1,
            "seen": self._seen,
            "steps": list(self.steps),
            "losses": list(self.losses),
            "norms": list(self.norms),
            "lrs": list(self.lrs),
            "first": list(self.first),
            "first_norms": list(self.first_norms),
            "peak": self.peak,
            "peak_step": self.peak_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._mask, self._seen = int(state["every"]) - 1, int(state["seen"])
        self.steps = [int(step) for step in state["steps"]]
        self.losses, self.norms = _floats(state["losses"]), _floats(state["norms"])
        self.lrs, self.first = _floats(state["lrs"]), _floats(state["first"])
        self.first_norms = _floats(state["first_norms"])
        self.peak = None if state["peak"] is None else float(state["peak"])
        self.peak_step = int(state["peak_step"])


def _floats(values: list[Any]) -> list[float]:
    return [float(value) for value in values]
