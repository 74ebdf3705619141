"""A loss scale that keeps falling: gradients overflow again and again, or are about to underflow."""

import math
from typing import Any, final

from steadystep.records import Finding, Signals

_NOTHING: tuple[Finding, ...] = ()
_CALIBRATION_STEPS = 200
_CUTS = 3
_WITHIN_STEPS = 50
_HELD_STEPS = 8  # at one scale: it has been found, and what comes after is no search for it
_EARLY_CUTS, _WITHIN_EARLY = 5, 20  # in the first 200 steps gradients still grow, and single cuts follow them
_LOWEST = 1.0


@final
class LossScale:
    """Silent without a scaler. Three cuts within 50 steps, or a scale below 1, are a warning.

    A healthy scaler cuts about once per 2000 steps, after it tried to grow; its first 200 steps are calibration, where
    it takes five cuts within 20 steps after a scale that has held for 8. In GLM-130B and BLOOM-104B the scale fell 30
    to 1500 steps before the loss showed anything. Heard once per `quiet_steps`.
    """

    name = "loss-scale"

    def __init__(self, *, quiet_steps: int = 500) -> None:
        self._quiet_steps = quiet_steps
        self._steps = 0
        self._scale: float | None = None
        self._cuts: list[int] = []
        self._early: list[int] = []
        self._since = 0
        """When the scale became what it is."""
        self._found = False
        self._until = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding, at a step whose scale is another than before."""
        if not signals.scaled:
            return _NOTHING
        self._steps += 1
        return _NOTHING if signals.scale == self._scale else self._changed(signals)

    def _changed(self, signals: Signals) -> tuple[Finding, ...]:
        scale, before = signals.scale, self._scale
        if not math.isfinite(scale):
            return _NOTHING
        self._scale = scale
        self._found = self._found or (before is not None and self._steps - self._since >= _HELD_STEPS)
        self._since = self._steps
        if before is not None and scale < before:
            self._cut()
        if self._steps < self._until:
            return _NOTHING
        if scale < _LOWEST:
            return self._say(signals, scale, _LOWEST, f"the loss scale fell to {scale:g}: small gradients underflow")
        if len(self._cuts) >= _CUTS:
            what = f"the loss scale was cut {len(self._cuts)} times within {_WITHIN_STEPS} steps, to {scale:g}"
            return self._say(signals, float(len(self._cuts)), float(_CUTS), what)
        if len(self._early) >= _EARLY_CUTS:
            what = f"the loss scale was cut {len(self._early)} times within {_WITHIN_EARLY} steps, to {scale:g}"
            return self._say(signals, float(len(self._early)), float(_EARLY_CUTS), what)
        return _NOTHING

    def _cut(self) -> None:
        if self._steps > _CALIBRATION_STEPS:
            self._early = []
            self._cuts = [step for step in self._cuts if step > self._steps - _WITHIN_STEPS]
            self._cuts.append(self._steps)
        elif self._found:
            self._early = [step for step in self._early if step > self._steps - _WITHIN_EARLY]
            self._early.append(self._steps)

    def _say(self, signals: Signals, value: float, limit: float, what: str) -> tuple[Finding, ...]:
        self._until = self._steps + self._quiet_steps
        return (Finding(detector=self.name, step=signals.step, severity="warn", value=value, limit=limit, what=what),)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "steps": self._steps,
            "scale": self._scale,
            "cuts": list(self._cuts),
            "early": list(self._early),
            "since": self._since,
            "found": self._found,
            "until": self._until,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._steps, self._until = int(state["steps"]), int(state["until"])
        self._scale = None if state["scale"] is None else float(state["scale"])
        self._cuts = [int(step) for step in state["cuts"]]
        self._early = [int(step) for step in state.get("early", ())]
        self._since, self._found = int(state.get("since", 0)), bool(state.get("found", False))
