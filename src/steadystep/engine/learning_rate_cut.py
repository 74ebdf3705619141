"""A ceiling over the learning rate while a run recovers: lowered at once, lifted slowly, always gone in the end.

The rule, in healthy updates:

* held for 100, or for what was asked; twice as long each time trouble comes back under it, 1,600 at most
* then lifted by 2 % per update, to 1.5 times where it was lowered to, but no further than 0.7 of a level under which
  trouble came back
* from there on by 0.3 % per update, or by as much as it takes to reach what is asked for in 800 updates after the hold

So after `WITHIN` healthy updates the learning rate asked for is in use again; after one cut to 0.7, in 119.
"""

import math
from typing import Any, final

_GROWTH = 1.02  # per update once the stretch of healthy updates is over: 0.7 is won back in 18 of them
_KNOWN = 1.5  # times where it was lowered to: beyond that the learning rate was not in use before,
_UNKNOWN_GROWTH = 1.003  # and has to show step by step that it is harmless
_HOLD = 100  # healthy updates before it is lifted
_LONGEST_HOLD = 1600
_LIFT = 800  # updates after the hold
_SAFE = 0.7  # of a learning rate under which trouble came back
_FLOOR = 0.01  # of the learning rate that was in use: no ceiling is lower
_REWARM_FROM = 0.1

WITHIN = _LONGEST_HOLD + _LIFT
"""Healthy updates after which a ceiling is gone, whatever happened before; a longer rewarm takes its own length."""


@final
class Ceiling:
    """An absolute limit, so that a schedule which decays below it, or a jump that is withdrawn, ends it by itself."""

    def __init__(self) -> None:
        self.lr: float | None = None
        """The limit now; None when there is none."""
        self.asked = 0.0
        """What was asked for at the last update."""
        self._level = 0.0
        self._known = 0.0
        self._hold = _HOLD
        self._left = self._lift_left = 0
        self._rewarm_left = self._rewarm_steps = 0
        self.low = False
        """Whether the learning rate may have to be lowered."""

    def limit(self, lr: float, *, hold: int | None = None) -> None:
        """Lower the ceiling to `lr`, for `hold` healthy updates or the usual number.

        Under a ceiling that was in force already the next lift is later, and slow from a lower level on. No limit goes
        below a hundredth of the learning rate asked for before the first one.
        """
        if not lr > 0.0:  # it could never be lifted again
            return
        if self.lr is None:
            self._level = self.lr = max(lr, _FLOOR * self.asked)
            self._known = _KNOWN * self.lr
        else:
            self._hold = min(2 * self._hold, _LONGEST_HOLD)
            failed, floor = self.lr, _FLOOR * min(self._level, self.asked)
            self.lr = min(max(lr, floor), self.lr)
            self._known = min(_KNOWN * self.lr, _SAFE * failed)
        self._left = min(self._hold if hold is None else hold, _LONGEST_HOLD)
        self._lift_left = _LIFT
        self.low = True

    def rewarm(self, steps: int) -> None:
        """Rise from a tenth over the next `steps` updates."""
        self._rewarm_left = self._rewarm_steps = steps
        self.low = self.lr is not None or steps > 0

    def give_back(self) -> None:
        """End everything at once: what it was for has come to nothing."""
        self._rewarm_left = self._rewarm_steps = 0
        self._end()

    def multiplier(self, asked: float) -> float:
        """What to multiply `asked` by for the next update."""
        limited = 1.0 if self.lr is None or not asked > self.lr else self.lr / asked
        if not self._rewarm_left:
            return limited
        done = 1.0 - self._rewarm_left / self._rewarm_steps
        return limited * (_REWARM_FROM + (1.0 - _REWARM_FROM) * done)

    def updated(self, asked: float) -> None:
        """One update was taken at `asked`, or at less because of the ceiling."""
        self.asked = asked
        self._rewarm_left -= self._rewarm_left > 0
        if self.lr is None:
            self.low = self._rewarm_left > 0
            return
        if self._left > 0:
            self._left -= 1
            return
        self.lr *= _GROWTH if self.lr < self._known else max(_UNKNOWN_GROWTH, self._growth_needed(asked))
        self._lift_left -= 1
        if not self.lr < asked or not self._lift_left:
            self._end()

    def _growth_needed(self, asked: float) -> float:
        assert self.lr is not None
        return math.pow(max(asked / self.lr, 1.0), 1.0 / self._lift_left)

    def _end(self) -> None:
        self.lr = None
        self._hold, self._left, self._lift_left = _HOLD, 0, 0
        self.low = self._rewarm_left > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "lr": self.lr,
            "rates": [self.asked, self._level, self._known],
            "hold": [self._hold, self._left, self._lift_left],
            "rewarm": [self._rewarm_left, self._rewarm_steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.lr = None if state["lr"] is None else float(state["lr"])
        self.asked, self._level, self._known = (float(rate) for rate in state["rates"])
        self._hold, self._left, self._lift_left = (int(count) for count in state["hold"])
        self._rewarm_left, self._rewarm_steps = (int(value) for value in state["rewarm"])
        self.low = self.lr is not None or self._rewarm_left > 0
