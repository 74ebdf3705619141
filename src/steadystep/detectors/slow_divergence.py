"""A loss that creeps upwards by less than its own noise: a cumulative sum (Page 1954) against its recent best level.

The best level is the lowest of the trailing means of the last few hundred steps; sigma comes from differences of
neighbouring losses, which a trend does not widen. Losses above the level add to the sum, losses below take from it.
"""

import math
from collections import deque
from itertools import pairwise
from typing import Any, final

from steadystep.detectors.planned_rise import PlannedRise
from steadystep.records import Finding, Severity, Signals
from steadystep.stats import Cusum

_BLOCK = 16  # losses
_TRAILING = 4  # blocks in a trailing mean
_REMEMBERED = 24  # trailing means the best is taken from
_SIGNED = 16  # blocks for which a negative loss is remembered
_QUIET = 8  # steps between two findings at least: each may cost a few forward passes
_LOOK_AGAIN = 2  # steps: the sum is high and the last block is not, by chance perhaps
_ASK_AGAIN = 32  # steps: a suspicion that stays is worth another look at an old batch
_SLACK = 0.35  # sigma; covers that the best of several means lies below the true level
_SUSPECT, _WARN, _ACT = 7.0, 8.0, 80.0
_WARN_UNLEARNED, _LEARNED = 40.0, 4.0  # sigma: a loss that has never gone down has little to lose and swings by itself
_PER_DOUBLING, _SHORT = 8.0, 256  # a long run has more chances of a false warning, so its mark rises: 32 at 2,048 steps
_LOST = 0.25  # of the progress made: by itself a smaller rise may as well be harder data
_NOISE = 0.4  # sigma: less than this cannot be told from the noise of an old batch either
_MATERIAL = 0.02  # of the loss and of the progress made: a rise smaller than this is no divergence yet


@final
class SlowDivergence:
    """Suspects at 7 sigma in sum, warns at 8 or more, asks for action at 80 if much is lost or the rate climbs.

    The mark for a warning rises by 8 with every doubling of the run beyond 256 steps; it is 40 at least while nothing
    has been learned, and the one for a suspicion while the learning rate goes where it has never been.

    A suspicion is a note; it is worth running one old batch again, and that settles it either way.
    """

    name = "slow-divergence"

    def __init__(self) -> None:
        self._sum = Cusum(slack=_SLACK, cap=4.0)
        self._rise = PlannedRise()
        self._losses: list[float] = []
        self._blocks: deque[float] = deque(maxlen=_TRAILING)
        self._means: deque[float] = deque(maxlen=_REMEMBERED)
        self._first = math.nan
        self._seen = 0
        self._signed = 0
        self._best = math.nan
        self._sigma = math.nan
        self._said = 0.0
        self._warned = False
        self._silent = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """A finding each time the sum passes the next mark."""
        loss = signals.loss
        if loss - loss != 0.0:
            return ()
        if self._rise.update(signals.lr, signals.announced_lr):
            self._start_again()
        self._seen += 1
        self._losses.append(loss)
        total = self._sum.add((loss - self._best) / self._sigma) if self._sigma > 0.0 else 0.0
        if len(self._losses) == _BLOCK:
            self._close_block(signals.loss_eps)
        if total < _SUSPECT:
            self._said, self._warned = 0.0, False
            return ()
        self._silent += 1
        due = total >= self._said if self._silent >= _QUIET else not self._said
        grave = not self._warned and self._silent >= _LOOK_AGAIN and total >= self._mark()
        return self._judge(signals, total) if due or grave or self._silent >= _ASK_AGAIN else ()

    def _close_block(self, eps: float) -> None:
        losses, self._losses = self._losses, []
        ordered = sorted(losses)
        if not math.isfinite(sum(abs(loss) for loss in losses) * _TRAILING):  # beyond what can be added up
            self._start_again()
            return
        # why a trimmed mean: one wild batch must not move the level
        self._blocks.append(sum(ordered[2:-2]) / (_BLOCK - 4))
        if math.isnan(self._first):
            self._first = self._blocks[0]
        # A negative loss (policy gradients) may rise for good reasons: its level says nothing.
        self._signed = _SIGNED if ordered[0] < 0.0 else max(self._signed - 1, 0)
        if self._signed:
            self._start_again()
            return
        jumps = sorted(abs(b - a) for a, b in pairwise(losses))
        # Median and mean |difference| of neighbours, as sigma of a normal sequence; with heavy tails the mean is more.
        noise = max(jumps[len(jumps) // 2] / 0.954, sum(jumps) / len(jumps) / 1.128)
        self._sigma = noise if math.isnan(self._sigma) else 0.8 * self._sigma + 0.2 * noise
        if len(self._blocks) == _TRAILING:
            mean = sum(self._blocks) / _TRAILING
            self._sigma = max(self._sigma, 4.0 * eps * abs(mean))
            self._means.append(mean)
            self._best = min(self._means)
        else:
            self._best = math.nan

    def _judge(self, signals: Signals, total: float) -> tuple[Finding, ...]:
        now = self._blocks[-1] if self._blocks else signals.loss
        material = max(_MATERIAL * max(abs(self._best), self._first - self._best), _NOISE * self._sigma)
        warn = self._mark()
        severity: Severity = "warn" if total >= warn else "info"
        if total >= _ACT and (self._rise.climbing or now - self._best >= _LOST * (self._first - self._best)):
            severity = "act"
        if now - self._best < material:
            self._said, self._silent = total, 0
            return ()
        self._said, self._silent = total + _SUSPECT / 2.0, 0
        if severity == "warn" and self._warned:
            severity = "info"
        self._warned = self._warned or severity == "warn"
        since = signals.step - self._sum.since
        found = Finding(
            detector=self.name,
            step=signals.step,
            severity=severity,
            value=now,
            limit=self._best + material,
            usual=self._best,
            since=since,
            what=f"the loss has been rising since about step {since}: from {self._best:.4g} to about {now:.4g}",
        )
        if severity == "act":
            self._start_again()
        return (found,)

    def _mark(self) -> float:
        if self._rise.climbing:
            return _SUSPECT
        mark = _WARN + _PER_DOUBLING * max(math.log2(self._seen / _SHORT), 0.0)
        return mark if self._first - self._best >= _LEARNED * self._sigma else max(mark, _WARN_UNLEARNED)

    def _start_again(self) -> None:
        self._sum.reset()
        self._losses = []
        self._blocks.clear()
        self._means.clear()
        self._best = self._sigma = math.nan
        self._said, self._warned, self._silent = 0.0, False, 0

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "sum": self._sum.state_dict(),
            "rise": self._rise.state_dict(),
            "losses": list(self._losses),
            "blocks": list(self._blocks),
            "means": list(self._means),
            "level": [_or_none(value) for value in (self._first, self._best, self._sigma)],
            "signed": self._signed,
            "seen": self._seen,
            "said": [self._said, self._silent, self._warned],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._sum.load_state_dict(state["sum"])
        self._rise.load_state_dict(state["rise"])
        self._losses = [float(loss) for loss in state["losses"]]
        for held, saved in ((self._blocks, state["blocks"]), (self._means, state["means"])):
            held.clear()
            held.extend(float(value) for value in saved)
        self._first, self._best, self._sigma = (math.nan if v is None else float(v) for v in state["level"])
        self._signed, self._seen = int(state["signed"]), int(state["seen"])
        said, silent, warned = state["said"]
        self._said, self._silent, self._warned = float(said), int(silent), bool(warned)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
