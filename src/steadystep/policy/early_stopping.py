"""Stop when validation has not improved for a while."""

import math
from typing import Any, final


@final
class EarlyStopping:
    """Counts validations in a row that were no better than the best. A value that is not finite never is better.

    >>> early = EarlyStopping(patience=2)
    >>> [early.update(loss) for loss in (1.0, 0.8, 0.9, 0.85)]
    [True, True, False, False]
    >>> early.should_stop
    True
    """

    def __init__(self, *, patience: int | None) -> None:
        self._patience = patience
        self.best = math.inf
        self.since_best = 0

    @property
    def wanted(self) -> bool:
        """There is a patience."""
        return self._patience is not None

    @property
    def should_stop(self) -> bool:
        """So many in a row; never without a patience."""
        return self._patience is not None and self.since_best >= self._patience

    def update(self, loss: float) -> bool:
        """Take in one validation; True when it is the best so far."""
        better = loss < self.best and math.isfinite(loss)
        if better:
            self.best = loss
        self.since_best = 0 if better else self.since_best + 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"best": self.best if math.isfinite(self.best) else None, "since_best": self.since_best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.since_best = int(state["since_best"])
