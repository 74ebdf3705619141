"""A ceiling over the learning rate while a run recovers: lowered at once, lifted slowly, gone when it is not needed."""

from typing import Any, final

_GROWTH = 1.02  # per update once the stretch of healthy updates is over: 0.7 is won back in 18 of them
_KNOWN = 1.5  # times where it was lowered to: beyond that the learning rate was not in use before,
_UNKNOWN_GROWTH = 1.003  # and has to show step by step that it is harmless
_HOLD = 100  # healthy updates before it is lifted
_LONGEST_HOLD = 1600
_SAFE = 0.7  # of a learning rate under which trouble came back: as far as the ceiling rises again
_REWARM_FROM = 0.1


@final
class Ceiling:
    """An absolute limit, so that a schedule which decays below it, or a jump that is withdrawn, ends it by itself."""

    def __init__(self) -> None:
        self.lr: float | None = None
        """The limit now; None when there is none."""
        self._cap: float | None = None
        self._known = 0.0
        self._hold = _HOLD
        self._left = 0
        self._rewarm_left = self._rewarm_steps = 0

    @property
    def low(self) -> bool:
        """Whether the learning rate may have to be lowered."""
        return self.lr is not None or self._rewarm_left > 0

    def limit(self, lr: float, *, hold: int | None = None) -> None:
        """Lower the ceiling to `lr`, for `hold` healthy updates or the usual number.

        Under a ceiling that was in force already the next lift is later and lower.
        """
        if not lr > 0.0:  # it could never be lifted again
            return
        if self.lr is not None:
            self._cap = _SAFE * self.lr if self._cap is None else min(self._cap, _SAFE * self.lr)
            self._hold = min(2 * self._hold, _LONGEST_HOLD)
        self.lr = lr if self.lr is None else min(lr, self.lr)
        self._known = _KNOWN * self.lr
        self._left = self._hold if hold is None else hold

    def rewarm(self, steps: int) -> None:
        """Rise from a tenth over the next `steps` updates."""
        self._rewarm_left = self._rewarm_steps = steps

    def multiplier(self, asked: float) -> float:
        """What to multiply `asked` by for the next update."""
        limited = 1.0 if self.lr is None or not asked > self.lr else self.lr / asked
        if not self._rewarm_left:
            return limited
        done = 1.0 - self._rewarm_left / self._rewarm_steps
        return limited * (_REWARM_FROM + (1.0 - _REWARM_FROM) * done)

    def updated(self, asked: float) -> None:
        """One update was taken at `asked`, or at less because of the ceiling."""
        self._rewarm_left -= self._rewarm_left > 0
        if self.lr is None:
            return
        if self._left > 0:
            self._left -= 1
            return
        lifted = self.lr * (_GROWTH if self.lr < self._known else _UNKNOWN_GROWTH)
        self.lr = lifted if self._cap is None else min(lifted, self._cap)
        if self.lr >= asked:
            self.lr = self._cap = None
            self._hold = _HOLD

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        rewarm = [self._rewarm_left, self._rewarm_steps]
        lifting = {"lr": self.lr, "cap": self._cap, "known": self._known}
        return lifting | {"hold": self._hold, "left": self._left, "rewarm": rewarm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.lr, self._cap, self._known = state["lr"], state["cap"], float(state["known"])
        self._hold, self._left = int(state["hold"]), int(state["left"])
        self._rewarm_left, self._rewarm_steps = (int(value) for value in state["rewarm"])
