"""How often the gradient norm is above the limit it is clipped to."""

import math
from typing import Any, final

from steadystep.errors import ConfigError
from steadystep.records import Finding, Severity, Signals

_NOTHING: tuple[Finding, ...] = ()
_BLOCK = 100
_BLOCKS = 5
_OFTEN = 0.1
_MOSTLY = 0.5
_FAR = 10.0
_SETTLED_BLOCKS = 10  # the first 1000 steps are often clipped in a healthy run


@final
class ClipRate:
    """Counts in blocks of 100 steps. More than a tenth clipped is a note, heard once per `quiet_steps`.

    It is no more than that even if all are: Adam divides by the size of the gradient, and a byte-level GPT clipped
    to half its norm on nine of ten steps ends where it does without. Cut to less than a tenth on most of 500 steps,
    after the first 1000, the clip sets the size of the steps and the learning rate no longer does: a warning, once in a
    run.
    """

    name = "clip-rate"

    def __init__(self, max_norm: float, *, quiet_steps: int = 5000) -> None:
        if not max_norm > 0.0:
            raise ConfigError(f"max_norm must be above 0, got {max_norm}")
        self._max_norm = max_norm
        self._quiet_blocks = max(1, quiet_steps // _BLOCK)
        self._steps = 0
        self._clipped = 0
        self._far = 0
        self._blocks = 0
        self._recent: list[int] = []  # of the last blocks, how many norms were far above
        self._rest = 0
        self._warned = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """At most one finding, every 100 steps; norms that are not finite do not count."""
        norm = signals.grad_norm
        if norm > self._max_norm:
            if norm == math.inf:
                return _NOTHING
            self._clipped += 1
            self._far += norm > _FAR * self._max_norm
        elif norm != norm:
            return _NOTHING
        self._steps += 1
        return self._judge(signals) if self._steps == _BLOCK else _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        clipped = self._clipped
        self._recent = [*self._recent[1 - _BLOCKS :], self._far]
        self._steps = self._clipped = self._far = 0
        self._blocks += 1
        self._rest = max(0, self._rest - 1)
        far = sum(self._recent) / (_BLOCK * _BLOCKS)
        if far > _MOSTLY and self._blocks >= _SETTLED_BLOCKS and not self._warned:
            self._warned = True
            what = f"{far:.0%} of the last {_BLOCK * _BLOCKS} gradients were more than {_FAR:g} times max_norm"
            what = f"{what} = {self._max_norm:g}: the clip sets the size of the steps, not the learning rate"
            return (self._finding(signals, "warn", far, _MOSTLY, what),)
        if clipped > _OFTEN * _BLOCK and not self._rest:
            self._rest = self._quiet_blocks
            what = f"{clipped} of the last {_BLOCK} gradients were above max_norm = {self._max_norm:g}"
            return (self._finding(signals, "info", clipped / _BLOCK, _OFTEN, what),)
        return _NOTHING

    def _finding(self, signals: Signals, severity: Severity, value: float, limit: float, what: str) -> Finding:
        return Finding(detector=self.name, step=signals.step, severity=severity, value=value, limit=limit, what=what)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "steps": self._steps,
            "clipped": self._clipped,
            "far": self._far,
            "blocks": self._blocks,
            "recent": list(self._recent),
            "rest": self._rest,
            "warned": self._warned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._steps, self._clipped, self._far = int(state["steps"]), int(state["clipped"]), int(state["far"])
        self._blocks, self._rest, self._warned = int(state["blocks"]), int(state["rest"]), bool(state["warned"])
        self._recent = [int(count) for count in state["recent"]]
