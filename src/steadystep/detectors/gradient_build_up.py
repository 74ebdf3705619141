"""A gradient norm that adds up, from the first step on or later: the mark of a forgotten `zero_grad`."""

import math
from collections import deque
from itertools import pairwise
from typing import Any, final

from steadystep.detectors.policy import policy_metrics
from steadystep.records import Finding, Signals
from steadystep.stats import Level

_HISTORY = 128  # usual norms; none is judged before there are so many
_RAISED, _PILED = math.log(2.0), math.log(3.0)  # times the usual norm: where a stretch begins, and all that is judged
_STEPS = 8  # norms that are judged together
_LONGEST = 32  # steps: what climbs more slowly is another level
_FIRST = math.log(4.0)  # a sum that has just begun is not larger
_BEFORE = math.log(1.5)  # the median of the 16 norms before: it must have begun from rest
_REST = 16
_SMOOTH = 0.5  # of the usual change from step to step
_NOISY = 0.1  # logarithm of that change: with less, single gradients are as smooth as a sum
_CALM = 1.5  # sigma of the loss: a loss that rises has gradients of its own
_RATE = 1.0 / 64.0


@final
class Piling:
    """True once in a stretch: eight norms are three times the usual one and half as noisy, and the loss is as usual."""

    def __init__(self) -> None:
        self._level = Level(_HISTORY, armed_after=_HISTORY)
        self._losses = Level(_HISTORY)
        self._rest: deque[float] = deque(maxlen=_REST)
        """Logarithms of the last usual norms."""
        self._jitter = 0.0
        """How much they differ from one step to the next."""
        self._largest = -math.inf
        """Logarithm of the largest norm that was not raised."""
        self._last: float | None = None
        """Of the step before, where its norm was usual."""
        self._stretch: list[tuple[float, float]] = []
        """Logarithms of raised norms, with their losses."""
        self._told = False

    def update(self, signals: Signals) -> bool:
        """One more step; what is not finite ends a stretch."""
        norm, loss = signals.grad_norm, signals.loss
        if not 0.0 < norm < math.inf or loss - loss != 0.0:
            self._end()
            return False
        log_norm = math.log(norm)
        if not self._level.armed or log_norm - self._level.median <= _RAISED:
            self._learn(log_norm, loss)
            return False
        self._last = None
        self._stretch.append((log_norm, loss))
        if len(self._stretch) > _LONGEST:  # why: neither a sum of a few gradients nor what was usual before
            self._level.start_again()
            self._end()
        # why: a policy that is nearly certain learns from its rare mistakes, with the gradients of an earlier time
        low = bool(signals.metrics) and bool(policy_metrics(signals)) and log_norm <= self._largest
        news = not self._told and len(self._stretch) >= _STEPS and not low and self._is_sum()
        self._told = self._told or news
        return news

    @property
    def baseline(self) -> float:
        """The norm of a single gradient."""
        return math.exp(self._level.median)

    @property
    def limit(self) -> float:
        """What all judged norms are above."""
        return self.baseline * math.exp(_PILED)

    @property
    def num_steps(self) -> int:
        """In the present stretch."""
        return len(self._stretch)

    def _learn(self, log_norm: float, loss: float) -> None:
        if self._last is not None:
            self._jitter += _RATE * (abs(log_norm - self._last) - self._jitter)
        self._largest = max(self._largest, log_norm)
        self._level.accept(log_norm)
        self._losses.accept(loss)
        self._rest.append(log_norm)
        if self._stretch:
            self._end()
        self._last = log_norm

    def _end(self) -> None:
        self._stretch, self._told, self._last = [], False, None

    def _is_sum(self) -> bool:
        baseline, judged = self._level.median, self._stretch[-_STEPS:]
        norms = [norm for norm, _ in judged]
        if min(norms) - baseline < _PILED or self._stretch[0][0] - baseline > _FIRST:
            return False
        if self._jitter < _NOISY or sorted(self._rest)[len(self._rest) // 2] - baseline > _BEFORE:
            return False
        losses = [loss for _, loss in judged]
        if min(losses) < 0.0:  # why: the gradient of a likelihood grows with its precision
            return False
        if sum(losses) / _STEPS > self._losses.median + _CALM * self._losses.spread:
            return False
        climb = (norms[-1] - norms[0]) / (_STEPS - 1)
        moves = (abs(after - before - climb) for before, after in pairwise(norms))
        return sum(moves) / (_STEPS - 1) <= _SMOOTH * self._jitter

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "level": self._level.state_dict(),
            "losses": self._losses.state_dict(),
            "rest": list(self._rest),
            "jitter": self._jitter,
            "largest": None if self._largest == -math.inf else self._largest,
            "last": self._last,
            "stretch": [list(pair) for pair in self._stretch],
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._level.load_state_dict(state["level"])
        self._losses.load_state_dict(state["losses"])
        self._rest.clear()
        self._rest.extend(float(norm) for norm in state["rest"])
        self._jitter, self._told = float(state["jitter"]), bool(state["told"])
        largest = state.get("largest")  # earlier versions had none
        self._largest = -math.inf if largest is None else float(largest)
        self._last = None if state["last"] is None else float(state["last"])
        self._stretch = [(float(norm), float(loss)) for norm, loss in state["stretch"]]


_NOTHING: tuple[Finding, ...] = ()
_RAMP = 32
_EDGES = (0, 1, 2, 4, 8, 16, 32)
_SMALLEST, _LARGEST = 1.2, 2.4  # growth per doubling of the time: 2 if gradients agree, 1.4 if they are independent
_GROWTH = 8.0
_MOST = 28.0  # gradients that agree perfectly reach 24.5; more than that is another story
_RISING = 0.85


@final
class GrowingGradient:
    """Warns when gradient norms add up from step to step, as after a forgotten `zero_grad`.

    Gradients that are never cleared add up, n(t) = |g_1 + ... + g_t|, so the mean norm of steps 1, 2, 3-4, 5-8, 9-16
    and 17-32 grows by a factor of nearly two each time; the first 32 norms of a run are judged once. An explosion grows
    faster and faster, a warmup or a drift far more slowly. Later, a healthy net that leaves a flat region can grow like
    that; there the norms must also have become smoother than those of single batches.
    """

    name = "growing-gradient"

    def __init__(self) -> None:
        self._norms: list[float] = []
        self._done = False
        self._piling = Piling()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding for the beginning, and one for each time later; non-finite norms do not count."""
        if self._piling.update(signals):
            return (self._piled(signals),)
        if self._done:
            return _NOTHING
        norm = signals.grad_norm
        if norm - norm == 0.0:
            self._norms.append(norm)
            if len(self._norms) == _RAMP:
                return self._judge(signals)
        return _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        norms, self._norms, self._done = self._norms, [], True
        growth = _growth(norms)
        if not _GROWTH <= growth <= _MOST:
            return _NOTHING
        what = f"the gradient norm grew {growth:.0f}-fold in {_RAMP} steps, as it does without zero_grad"
        return (
            Finding(detector=self.name, step=signals.step, severity="warn", value=growth, limit=_GROWTH, what=what),
        )

    def _piled(self, signals: Signals) -> Finding:
        baseline = self._piling.baseline
        what = (
            f"the gradient norm rose to {signals.grad_norm / baseline:.2g} times its baseline of {baseline:.3g} and "
            "varies far less between batches, as it does without zero_grad"
        )
        return Finding(
            detector=self.name,
            step=signals.step,
            severity="warn",
            value=signals.grad_norm,
            limit=self._piling.limit,
            baseline=baseline,
            since=max(0, signals.step - self._piling.num_steps),
            what=what,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "norms": list(self._norms),
            "done": self._done,
            "piling": self._piling.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._norms = [float(norm) for norm in state["norms"]]
        self._done = bool(state["done"])
        if state.get("piling") is not None:  # older states do not have it
            self._piling.load_state_dict(state["piling"])


def _growth(norms: list[float]) -> float:
    """From the first block to the last one; 0.0 for what is no steady ramp."""
    means = [sum(norms[a:b]) / (b - a) for a, b in pairwise(_EDGES)]
    for before, after in pairwise(means):
        if not _SMALLEST * before <= after <= _LARGEST * before:
            return 0.0
    rising = sum(after > before for before, after in pairwise(norms))
    return means[-1] / means[0] if rising >= _RISING * (len(norms) - 1) else 0.0
