"""A learning rate that is cut when a metric stops improving, as torch.optim.lr_scheduler.ReduceLROnPlateau."""

import math
from collections.abc import Mapping
from typing import Any, Literal, SupportsFloat, final

from steadystep._utils.numbers import real, whole
from steadystep.errors import ConfigError
from steadystep.schedule.curves import share, shrink, warmup


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
        self._floor = share(f"{where}: floor", floor)
        self._eps = share(f"{where}: eps", eps)
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
