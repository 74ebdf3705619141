"""Gradients that pile up in the middle of a run: each is the one before plus a new one, because nobody cleared it.

A sum of gradients changes by one gradient a step, however long it has become. So its norm climbs within a few steps and
then hardly moves from batch to batch, where the norms of single batches differ as much as ever: what is noise in them
adds up more slowly than the sum. The loss has little to do with it at first.
"""

import math
from collections import deque
from itertools import pairwise
from typing import Any, final

from steadystep.records import Signals
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
        news = not self._told and len(self._stretch) >= _STEPS and self._is_sum()
        self._told = self._told or news
        return news

    @property
    def usual(self) -> float:
        """The norm of a single gradient."""
        return math.exp(self._level.median)

    @property
    def limit(self) -> float:
        """What all judged norms are above."""
        return self.usual * math.exp(_PILED)

    @property
    def num_steps(self) -> int:
        """In the present stretch."""
        return len(self._stretch)

    def _learn(self, log_norm: float, loss: float) -> None:
        if self._last is not None:
            self._jitter += _RATE * (abs(log_norm - self._last) - self._jitter)
        self._level.accept(log_norm)
        self._losses.accept(loss)
        self._rest.append(log_norm)
        if self._stretch:
            self._end()
        self._last = log_norm

    def _end(self) -> None:
        self._stretch, self._told, self._last = [], False, None

    def _is_sum(self) -> bool:
        usual, judged = self._level.median, self._stretch[-_STEPS:]
        norms = [norm for norm, _ in judged]
        if min(norms) - usual < _PILED or self._stretch[0][0] - usual > _FIRST:
            return False
        if self._jitter < _NOISY or sorted(self._rest)[len(self._rest) // 2] - usual > _BEFORE:
            return False
        if sum(loss for _, loss in judged) / _STEPS > self._losses.median + _CALM * self._losses.spread:
            return False
        climb = (norms[-1] - norms[0]) / (_STEPS - 1)
        moves = (abs(after - before - climb) for before, after in pairwise(norms))
        return sum(moves) / (_STEPS - 1) <= _SMOOTH * self._jitter

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "level": self._level.state_dict(),
            "losses": self._losses.state_dict(),
            "rest": list(self._rest),
            "jitter": self._jitter,
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
        self._last = None if state["last"] is None else float(state["last"])
        self._stretch = [(float(norm), float(loss)) for norm, loss in state["stretch"]]
