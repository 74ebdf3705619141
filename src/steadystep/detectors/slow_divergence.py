"""A loss that creeps upwards by less than its own noise: a cumulative sum (Page 1954) against its recent best level.

The best level is the lowest of the trailing means of the last few hundred steps; sigma comes from differences of
neighbouring losses, which a trend does not widen. Losses above the level add to the sum, losses below take from it. In
many healthy runs the level itself wanders (large steps, policies, adversaries), so a rise is also measured by those
that this run has come back from.
"""

import math
from collections import deque
from itertools import pairwise
from typing import Any, final

from steadystep.detectors.learning_rate_jump import PlannedRise
from steadystep.records import Finding, Severity, Signals
from steadystep.stats import Cusum

_BLOCK = 16  # losses
_TRAILING = 4  # blocks in a trailing mean
_RECENT = 24  # trailing means the best is taken from
_REMEMBERED = 96  # trailing means that show how the level of this run wanders
_SIGNED = 16  # blocks for which a negative loss is remembered
_QUIET = 8  # steps between two findings at least
_LOOK_AGAIN = 2  # steps: the sum is high and the last block is not, by chance perhaps
_ASK_AGAIN = 32  # steps: a suspicion that stays is worth another look
_SLACK = 0.35  # sigma; covers that the best of several means lies below the true level
_SUSPECT, _WARN = 7.0, 8.0
_LEARNED = 4.0  # sigma: a loss that has never gone down has little to lose and swings by itself
_PER_DOUBLING, _SHORT = 8.0, 256  # a long run has more chances of a false warning, so its mark rises: 32 at 2,048 steps
_LASTS = 56  # steps: bursts of noise are over by then
_ROUGH = 0.25  # sigma over the level: single losses differ so much that bursts last longer, the more so the rougher
_ROUGH_LASTS = 512  # steps, where sigma is the level; at the limit above a quarter of it
_JUMP = 5.0  # sigma: so high above its best, a block is enough
_TAILED, _TAILED_RATE = 3.0, 0.2  # mean over median of the differences, 1 for a normal sequence; per block
_STAYS = 0.8  # of the first half of a block, what the second half is at least
_WANDERS = 1.5  # sigma of a trailing mean: the largest rise so far that may have been noise
_TIMES = 6.0  # such rises
_FEW_MEANS, _MANY_MEANS = 6, 20  # trailing means before the best one: with fewer nobody can tell,
_GRAVE = 0.25  # of the progress made: so much lost is worth a rollback
_LOST = 0.07  # and in between it must be this much of the progress made
_NOISE = 0.4  # sigma: less than this cannot be told from the noise of an old batch either
_MATERIAL = 0.02  # of the loss and of the progress made: a rise smaller than this is no divergence yet


@final
class SlowDivergence:
    """Notes a loss that creeps up by 7 sigma in sum, warns at 8 or more, asks for action at a quarter of the progress.

    The threshold for a warning rises by 8 with every doubling of the run beyond 256 steps; it is the one for a note
    while the learning rate is higher than ever before. A warning also takes 56 steps, or 16 where the loss is five
    sigma up, because bursts are over by then (128 to 512 steps and a whole sigma where sigma is a quarter of the level
    or more: SGD on few samples); and six times the largest rise that the level of this run has recovered from, if it
    wanders at all. There is none while nothing has been learned. A warning is a reason to compare weights
    (diagnosis/counterfactual.py).
    """

    name = "slow-divergence"

    def __init__(self) -> None:
        self._sum = Cusum(slack=_SLACK, cap=4.0)
        self._rise = PlannedRise()
        self._losses: list[float] = []
        self._block: list[float] = []
        """The losses of the last whole block."""
        self._blocks: deque[float] = deque(maxlen=_TRAILING)
        self._means: deque[float] = deque(maxlen=_REMEMBERED)
        self._first = math.nan
        self._seen = 0
        self._signed = 0
        self._best = math.nan
        self._sigma = math.nan
        self._noise = math.nan
        """Sigma between neighbours; `_sigma` has a floor."""
        self._calm_noise = math.nan
        """As it was when nothing was suspected."""
        self._tailed = 0.0
        """The share of recent blocks with heavy tails, such as those of single samples."""
        self._said = 0.0
        self._warned = self._asked = False
        self._silent = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding each time the sum passes the next threshold."""
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
        if total < _SUSPECT or math.isnan(self._best):  # the block that has just ended may have begun all anew
            self._said, self._warned, self._asked = 0.0, False, False
            return ()
        self._silent += 1
        due = total >= self._said if self._silent >= _QUIET else not self._said
        due = due or self._silent >= _ASK_AGAIN
        loud = not self._warned and self._silent % _LOOK_AGAIN == 0 and total >= self._mark()
        return self._judge(signals, total, due=due) if due or loud else ()

    def _close_block(self, eps: float) -> None:
        losses, self._losses = self._losses, []
        self._block = losses
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
        median, mean_jump = jumps[len(jumps) // 2] / 0.954, sum(jumps) / len(jumps) / 1.128
        noise = max(median, mean_jump)
        self._tailed += _TAILED_RATE * (float(mean_jump > _TAILED * median) - self._tailed)
        self._noise = noise if math.isnan(self._noise) else 0.8 * self._noise + 0.2 * noise
        if self._sum.value < _SUSPECT:
            self._calm_noise = self._noise
        if len(self._blocks) == _TRAILING:
            mean = sum(self._blocks) / _TRAILING
            self._sigma = max(self._noise, 4.0 * eps * abs(mean))
            self._means.append(mean)
            self._best = min(list(self._means)[-_RECENT:])
        else:
            self._best = math.nan

    def _judge(self, signals: Signals, total: float, *, due: bool) -> tuple[Finding, ...]:
        """Between two notes only a warning is news."""
        now = self._present()
        material = max(_MATERIAL * max(abs(self._best), self._first - self._best), _NOISE * self._sigma)
        if now - self._best < material:
            self._said, self._silent = (total, 0) if due else (self._said, self._silent)
            return ()
        loud = total >= self._mark() and self._stands_out(now)
        grave = loud and now - self._best >= _GRAVE * (self._first - self._best)
        severity: Severity = "info"
        if (loud and not self._warned) or (grave and not self._asked):
            severity = "act" if grave else "warn"
        if severity == "info" and not due:
            return ()
        self._said, self._silent = total + _SUSPECT / 2.0, 0
        self._warned, self._asked = self._warned or loud, self._asked or grave
        since = signals.step - self._sum.since
        found = Finding(
            detector=self.name,
            step=signals.step,
            severity=severity,
            value=now,
            limit=self._best + material,
            baseline=self._best,
            since=since,
            what=f"the loss has been rising since about step {since}: from {self._best:.4g} to about {now:.4g}",
        )
        return (found,)

    def _present(self) -> float:
        """The level of the last 16 losses."""
        recent = sorted([*self._block, *self._losses][-_BLOCK:])
        return sum(recent[2:-2]) / (len(recent) - 4)

    def _mark(self) -> float:
        if self._rise.climbing:
            return _SUSPECT
        return _WARN + _PER_DOUBLING * max(math.log2(self._seen / _SHORT), 0.0)

    def _stands_out(self, now: float) -> bool:
        """Something was learned, and the level has never risen like this before and come back."""
        if self._first - self._best < _LEARNED * min(self._sigma, self._calm_noise):
            return False
        if self._rise.climbing:
            return True
        means = list(self._means)
        known = means[: len(means) - means[::-1].index(self._best)] if self._best in means else []
        if len(known) < _FEW_MEANS:
            return False
        if self._tailed > 0.5:  # few losses make up the level of a block: only a rise beyond all of them says anything
            return sum(self._blocks) / len(self._blocks) - self._best >= _JUMP * self._noise
        rise, before, noise = now - self._best, _largest_rise(known), self._noise / math.sqrt(_TRAILING * _BLOCK)
        wanders = before > _WANDERS * noise
        jumped = self._sum.since >= _BLOCK and rise >= _JUMP * self._noise and self._stays()
        roughness = min(self._noise / self._best, 1.0) if self._best > 0.0 else 0.0
        if roughness > _ROUGH:
            lasting = jumped or (self._sum.since >= _ROUGH_LASTS * roughness and rise >= self._noise)
        else:
            lasting = jumped or self._sum.since >= _LASTS
        known_well = len(known) >= _MANY_MEANS or rise >= _LOST * (self._first - self._best)
        return lasting and known_well and (not wanders or rise >= _TIMES * before)

    def _stays(self) -> bool:
        """The last 16 losses are not on their way down, as they are where there is something new to learn."""
        recent = [*self._block, *self._losses][-_BLOCK:]
        older, newer = (sum(half) / len(half) for half in (recent[: _BLOCK // 2], recent[_BLOCK // 2 :]))
        return newer - self._best >= _STAYS * (older - self._best)

    def _start_again(self) -> None:
        self._sum.reset()
        self._losses = []
        self._blocks.clear()
        self._means.clear()
        self._block = []
        self._best = self._sigma = self._noise = self._calm_noise = math.nan
        self._said, self._silent = 0.0, 0
        self._warned = self._asked = False

    def _numbers(self) -> tuple[float, ...]:
        return self._first, self._best, self._sigma, self._noise, self._calm_noise

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "sum": self._sum.state_dict(),
            "rise": self._rise.state_dict(),
            "losses": list(self._losses),
            "block": list(self._block),
            "blocks": list(self._blocks),
            "means": list(self._means),
            "level": [_or_none(value) for value in self._numbers()],
            "signed": self._signed,
            "tailed": self._tailed,
            "seen": self._seen,
            "said": [self._said, self._silent, self._warned, self._asked],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._sum.load_state_dict(state["sum"])
        self._rise.load_state_dict(state["rise"])
        self._losses = [float(loss) for loss in state["losses"]]
        self._block = [float(loss) for loss in state["block"]]
        held_apart = (self._blocks, state["blocks"]), (self._means, state["means"])
        for held, saved in held_apart:
            held.clear()
            held.extend(float(value) for value in saved)
        numbers = (math.nan if v is None else float(v) for v in state["level"])
        self._first, self._best, self._sigma, self._noise, self._calm_noise = numbers
        self._signed, self._seen, self._tailed = int(state["signed"]), int(state["seen"]), float(state["tailed"])
        said, silent, warned, asked = state["said"]
        self._said, self._silent, self._warned, self._asked = float(said), int(silent), bool(warned), bool(asked)


def _largest_rise(means: list[float]) -> float:
    """How far the level has risen above its recent best before, and come back."""
    return max(mean - min(means[max(0, i - _RECENT) : i + 1]) for i, mean in enumerate(means))


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
