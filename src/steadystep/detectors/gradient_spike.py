"""A gradient far above the run's own level, seen before the update lands.

Gradient norms are log-normal to a good approximation, their level drifts over a run, and healthy runs have blips of up
to 7 times the level that heal by themselves. So: logarithms, a window, outliers are not learned, and a limit that the
healthy runs of docs/adr/0002 do not reach.
"""

import math
from collections import deque
from typing import Any, final

from steadystep.records import Finding, Signals
from steadystep.stats import Level

_REMEMBERED = 8  # looks at the single tensors
_REMEMBER_EVERY = 16  # steps
_COHERENT = 0.6  # of the limit: enough when nearly all tensors rose together, as a scaled loss or gradient makes them
_EXPLAINED = 3.0  # times the limit: what a batch may do whose loss is high too, such as an epoch's last with one sample
_AGREEMENT = math.log(4.0)
_SETTLED = 128  # steps; before, the first features form and norms leap: the limit is 1 + 128 / steps times as high


@final
class GradientSpike:
    """Speaks when the norm passes `factor` times its median and `deviations` sigma of its logarithm.

    A spike that reaches all tensors alike while the loss is as usual is no batch's doing and is noticed from 0.6 times
    the limit on. A hard batch has a high loss too, and gets three times the limit. Where the user's own clipping brings
    the norm back under the limit there is nothing left to do, and the finding is a note. Twelve outliers in a row that
    agree with each other are a new level.
    """

    name = "gradient-spike"

    def __init__(
        self, *, factor: float = 10.0, deviations: float = 8.0, history: int = 128, clipped_to: float = math.inf
    ) -> None:
        self._factor = math.log(factor)
        self._deviations = deviations
        self._gate = math.log(factor * _COHERENT)
        self._clipped_to = clipped_to
        self._level = Level(history)
        self._losses = Level(history)
        self._tensors: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED)
        self._until_next = 0
        self._learned = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding when this gradient is no member of its own history."""
        norm = signals.grad_norm
        if not 0.0 < norm < math.inf:
            return ()  # nothing to compare, or the non-finite gate's business
        log_norm, level = math.log(norm), self._level
        if not level.armed or log_norm - level.median <= self._gate:
            self._learn(log_norm, signals)
            return ()
        return self._judge(log_norm, signals)

    def _learn(self, log_norm: float, signals: Signals) -> None:
        norms = signals.norms
        self._learned += 1
        self._level.accept(log_norm)
        self._losses.accept(signals.loss)
        self._until_next -= 1
        if self._until_next <= 0:
            self._until_next = _REMEMBER_EVERY
            if self._tensors and len(self._tensors[0]) != len(norms):
                self._tensors.clear()
            self._tensors.append(norms)

    def _judge(self, log_norm: float, signals: Signals) -> tuple[Finding, ...]:
        usual = self._level.median
        ratios = self._ratios(signals.norms)
        margin = self._margin(signals.loss, ratios)
        if log_norm - usual <= margin:
            self._learn(log_norm, signals)
            return ()
        if self._level.reject(log_norm, agreement=_AGREEMENT):
            self._tensors.clear()
            return (self._finding(signals, usual, margin, "info", "the gradient norm has moved to a new level", ()),)
        held = min(signals.grad_norm, self._clipped_to) <= _exp(usual + margin)
        what = f"the gradient norm is {_exp(log_norm - usual):.3g} times its usual {_exp(usual):.3g}"
        what += ", held by your clipping" if held else ""
        worst = [signals.names[i] for ratio, i in reversed(ratios) if ratio > _exp(margin)]
        where = tuple(worst) if len(worst) <= len(ratios) // 2 else ()
        return (self._finding(signals, usual, margin, "info" if held else "act", what, where),)

    def _margin(self, loss: float, ratios: list[tuple[float, int]]) -> float:
        """How far above its median the logarithm of this norm may be."""
        young = math.log1p(_SETTLED / max(self._learned, 1))
        spread = self._deviations * self._level.spread
        raised = loss - self._losses.median
        if raised > 4.0 * self._losses.spread:
            return young + max(self._factor + math.log(_EXPLAINED), spread)
        if raised <= self._losses.spread and ratios and ratios[len(ratios) // 5][0] >= _exp(self._gate):
            return young + max(self._gate, _COHERENT * spread)
        return young + max(self._factor, spread)

    def _ratios(self, norms: tuple[float, ...]) -> list[tuple[float, int]]:
        """Each tensor's norm over its own usual one, rising, with its position. Only looked at when in doubt."""
        if not self._tensors or len(self._tensors[0]) != len(norms):
            return []
        found = []
        for i, norm in enumerate(norms):
            usual = sorted(seen[i] for seen in self._tensors)[len(self._tensors) // 2]
            if usual > 0.0 and math.isfinite(norm):
                found.append((norm / usual, i))
        return sorted(found)

    def _finding(
        self, signals: Signals, usual: float, margin: float, severity: Any, what: str, where: tuple[str, ...]
    ) -> Finding:
        return Finding(
            detector=self.name,
            step=signals.step,
            severity=severity,
            value=signals.grad_norm,
            limit=_exp(usual + margin),
            usual=_exp(usual),
            what=what,
            where=where,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "level": self._level.state_dict(),
            "losses": self._losses.state_dict(),
            "tensors": [list(norms) for norms in self._tensors],
            "until_next": self._until_next,
            "learned": self._learned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._level.load_state_dict(state["level"])
        self._losses.load_state_dict(state["losses"])
        self._tensors.clear()
        self._tensors.extend(tuple(float(norm) for norm in norms) for norms in state["tensors"])
        self._until_next, self._learned = int(state["until_next"]), int(state["learned"])


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # a limit beyond 1e304 is no limit, and no reason to raise
