"""Learning rates that are cut: when a metric stops improving (`Plateau`), and while a run recovers (`Ceiling`).

The rule of a ceiling, which is lowered at once, lifted slowly and always gone in the end, in healthy updates:

* held for 100, or for what was asked; twice as long each time trouble comes back under it, 1,600 at most
* then lifted by 2 % per update, to 1.5 times where it was lowered to, but no further than 0.7 of a level under which
  trouble came back
* from there on by 0.3 % per update, or by as much as it takes to reach what is asked for in 800 updates after the hold

So after `WITHIN` healthy updates the learning rate asked for is in use again; after one cut to 0.7, in 119.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, SupportsFloat, final

from steadystep._utils.numbers import real, whole
from steadystep.errors import ConfigError
from steadystep.schedule.curves import checked_share, shrink, warmup


@final
class Plateau:
    """Multiplies by `factor` after more than `patience` metrics in a row without an improvement.

    The only schedule with a state: calling it reads the multiplier, `update` changes it. Its decisions are those of
    torch's ReduceLROnPlateau, with one exception: a non-finite metric is never an improvement (torch takes -inf for the
    best loss, and cuts the rate from then on).

    Args:
        mode: "min" for a loss, "max" for an accuracy.
        factor: multiplier of each cut.
        patience: metrics without improvement before a cut.
        threshold: how much better counts as an improvement.
        threshold_mode: "rel" is a share of the best metric and needs positive metrics, as in torch; "abs" takes any.
        cooldown: metrics after a cut that do not count.
        floor: the lowest multiplier.
        eps: cuts smaller than this are not made. A multiplier; torch's is a learning rate.
        warmup_steps: steps over which the multiplier is also warmed up.
        warmup_start: multiplier at step 0.

    >>> plateau = Plateau(factor=0.5, patience=1)
    >>> for validation_loss in (1.0, 0.8, 0.8, 0.8):
    ...     plateau.update(validation_loss)
    >>> plateau(1000)
    0.5
    """

    def __init__(
        self,
        *,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        floor: float = 0.0,
        eps: float = 1e-8,
        warmup_steps: int = 0,
        warmup_start: float = 0.0,
    ) -> None:
        where = "schedule.Plateau"
        self._minimise = _chosen("mode", mode, ("min", "max")) == "min"
        self._relative = _chosen("threshold_mode", threshold_mode, ("rel", "abs")) == "rel"
        self._factor = shrink(f"{where}: factor", factor)
        self._patience = whole(f"{where}: patience", patience, least=0)
        self._threshold = real(f"{where}: threshold", threshold)
        if self._threshold < 0 or (self._relative and self._threshold >= 1):
            raise ConfigError(f"{where}: threshold = {threshold!r}: must be 0 or more, and below 1 when relative")
        self._cooldown = whole(f"{where}: cooldown", cooldown, least=0)
        self._floor = checked_share(f"{where}: floor", floor)
        self._eps = checked_share(f"{where}: eps", eps)
        self._warmup = warmup(warmup_steps, warmup_start)
        if self._factor == 1.0:
            raise ConfigError(f"{where}: factor = {factor!r}: must be below 1 to have an effect")
        self._multiplier = 1.0
        self._best: float | None = None
        self._num_bad = 0
        self._cooldown_left = 0

    def __call__(self, step: int) -> float:
        """The multiplier now; `step` matters during the warm-up only."""
        return self._multiplier * self._warmup(step)

    def update(self, metric: SupportsFloat) -> None:
        """Take the newest `metric`. Call it after each validation."""
        value = float(metric)
        if self._improves(value):
            self._best = value
            self._num_bad = 0
        else:
            self._num_bad += 1
        if self._cooldown_left > 0:
            self._cooldown_left -= 1
            self._num_bad = 0
        if self._num_bad > self._patience:
            self._cut()

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        change = -self._threshold if self._minimise else self._threshold
        bar = self._best * (1.0 + change) if self._relative else self._best + change
        return value < bar if self._minimise else value > bar

    def _cut(self) -> None:
        lower = max(self._multiplier * self._factor, self._floor)
        if self._multiplier - lower > self._eps:
            self._multiplier = lower
        self._cooldown_left = self._cooldown
        self._num_bad = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON. The arguments are not part of it."""
        return {
            "multiplier": self._multiplier,
            "best": self._best,
            "num_bad": self._num_bad,
            "cooldown_left": self._cooldown_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._multiplier = float(state["multiplier"])
        self._best = None if state["best"] is None else float(state["best"])
        self._num_bad = int(state["num_bad"])
        self._cooldown_left = int(state["cooldown_left"])


def _chosen(key: str, value: str, known: tuple[str, str]) -> str:
    if value not in known:
        raise ConfigError(f"schedule.Plateau: {key} = {value!r}: use '{known[0]}' or '{known[1]}'")
    return value


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
