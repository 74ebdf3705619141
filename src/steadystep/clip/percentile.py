"""Clipping to a percentile of past norms, the AutoClip rule.

Seetharaman, Wichern, Pardo, Le Roux: AutoClip, 2020, arXiv:2007.14469.

limit = the p-th percentile of the norms so far, this step's included (linear between ranks)
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any, final

from steadystep.clip import checks
from steadystep.clip.gradients import Params
from steadystep.clip.report import ClipReport
from steadystep.clip.rule import clip_by_rule_, teaches


@final
class PercentileClip:
    """Brings every gradient norm above the p-th percentile of the last `history_steps` down to it.

    With the paper's p = 10 nine steps in ten are clipped: it acts more like normalised gradient descent than like an
    emergency brake. Use 90 or more to touch outliers only. It learns the norms as measured, so it follows a new level.

    >>> import torch
    >>> clip = PercentileClip(percentile=50)
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> for norm in (1.0, 2.0, 9.0):
    ...     weight.grad = torch.tensor([norm])
    ...     report = clip.clip_([weight])
    >>> report.clipped, weight.grad
    (True, tensor([2.]))
    """

    def __init__(self, *, percentile: float = 10.0, history_steps: int = 1000) -> None:
        self._share = checks.real("percentile", percentile, most=100.0) / 100.0
        self._history_steps = checks.count("history_steps", history_steps)
        self._history: deque[float] = deque()
        self._ranked: list[float] = []

    def clip_(self, params: Params) -> ClipReport:
        """Clip gradients in place and learn from their norm."""
        return clip_by_rule_(params, self)

    def limit(self, norm: float) -> float:
        """The largest norm this step may have. Changes nothing."""
        if not math.isfinite(norm):
            return 0.0
        if norm == 0.0:
            return math.inf
        ranked = self._ranked.copy()  # why: a thousand pointers copy in less time than it takes to sort them
        if len(ranked) == self._history_steps:
            del ranked[bisect_left(ranked, self._history[0])]
        insort(ranked, norm)
        position = self._share * (len(ranked) - 1)
        below = int(position)
        above = min(below + 1, len(ranked) - 1)
        return ranked[below] + (ranked[above] - ranked[below]) * (position - below)

    def learn(self, norm: float) -> None:
        """Take in a norm as it was measured. Not finite, or zero: nothing to learn."""
        if not teaches(norm):
            return
        if len(self._history) == self._history_steps:
            del self._ranked[bisect_left(self._ranked, self._history.popleft())]
        self._history.append(norm)
        insort(self._ranked, norm)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON: the norms, oldest first."""
        return {"history": list(self._history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken; a shorter `history_steps` keeps the newest."""
        checks.keys("PercentileClip", state, "history")
        history = [checks.real("history", norm) for norm in state["history"]][-self._history_steps :]
        self._history, self._ranked = deque(history), sorted(history)
