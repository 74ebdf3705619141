"""One loss far above the others. Real pre-training is full of them and nearly all heal: a note, never an alarm."""

from typing import Any, final

from steadystep.records import Finding, Signals
from steadystep.stats import Level


@final
class LossSpike:
    """Notes a loss more than `deviations` sigma above its median."""

    name = "loss-spike"

    def __init__(self, *, deviations: float = 8.0, history: int = 128) -> None:
        self._deviations = deviations
        self._level = Level(history)

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A note when this loss stands out."""
        loss, level = signals.loss, self._level
        if loss - loss != 0.0:
            return ()
        if not level.armed or loss <= level.median:
            level.accept(loss)
            return ()
        floor = signals.loss_eps * 4.0 * abs(level.median)
        limit = level.median + self._deviations * max(level.spread, floor)
        if loss <= limit:
            level.accept(loss)
            return ()
        usual = level.median
        if level.reject(loss, agreement=limit - usual):
            return ()
        what = f"the loss jumped to {loss:.4g} from {usual:.4g}"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=loss,
                limit=limit,
                usual=usual,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return self._level.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._level.load_state_dict(state)
