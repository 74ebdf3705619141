"""What tells that a policy is in trouble beside its rollouts, and the proof that an earlier one earns more.

Metrics may move before rollouts do, or against them: a grader that changes or is exploited, entropy that rises. The
proof is two samples of rollouts with equal random numbers.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, final

from steadystep.engine.verdict import Ask, State
from steadystep.records import Counterfactual, DetectorName, Finding, Signals
from steadystep.rl import noise_of
from steadystep.rl.earned_series import SUSPECTED, EarnedSeries

ROLLOUTS = 8
_PROVED = 3.0  # standard errors
_SEEDS_APART = 100_003  # between the seeds of two samples

Scores = Sequence[Sequence[float]]

_READINGS = 64
_BEFORE = 5  # steps before the readings that a jump is measured from: looks that count as those before it
_STEADY = 40  # steps before them, in which rollouts have to have earned the same
_PRECISE = 0.3  # of what was gained: what rollouts have to be able to show
_PARTING = 40  # steps after a jump, in which a policy learns what the grader pays for now
_FEWEST = 6  # readings after it
_FELL, _CERTAIN = 0.1, 3.0  # of what was gained; standard errors
_RISEN, _LEAST, _LATEST, _APART = 1.3, 0.02, 4, 16  # times the largest of the readings before; nats; readings


@final
class EntropyWatch:
    """Remembers when a policy last was less certain than in all of 64 readings before, in the mean of four.

    Healthy policies fall without it, and most that unlearn do not.
    """

    def __init__(self) -> None:
        self._readings: list[float] = []
        self._rose = -math.inf

    def hear(self, step: int, entropy: float | None) -> bool:
        """Take in one reading; return whether the entropy has begun to be high, for the first time in 16 steps."""
        if entropy is None:
            return False
        known = self._readings
        known.append(entropy)
        del known[: -_READINGS - _APART]
        if len(known) < _READINGS + _APART:
            return False
        largest = max(known[:_READINGS])
        if not (largest > 0.0 and fmean(known[-_LATEST:]) > max(_RISEN * largest, largest + _LEAST)):
            return False
        begins, self._rose = not self.is_recent(step, _APART), step
        return begins

    def is_recent(self, step: int, within: int) -> bool:
        """Whether that was not long ago."""
        return step - self._rose <= within


@final
class GraderWatch:
    """Compares the rewards that a policy is trained on with what rollouts say that it earns.

    A reward that jumps while rollouts earn what they earned is another grader. So is one that rises after a jump while
    rollouts fall: the policy learns what is paid for now.
    """

    def __init__(self) -> None:
        self._rewards: list[tuple[int, float]] = []
        """Step and reward; a rollout that several updates share counts once."""
        self._jump: Finding | None = None

    def hear(self, step: int, reward: float | None) -> None:
        """Take in one reading."""
        if reward is None or (self._rewards and self._rewards[-1][1] == reward):
            return
        self._rewards.append((step, reward))
        del self._rewards[:-_READINGS]

    def is_close(self, step: int) -> bool:
        """Whether the reward has jumped not long ago."""
        return self._jump is not None and step - self._jump.step <= _PARTING

    def changed(self, finding: Finding, series: EarnedSeries) -> Finding:
        """The note of a jump as a warning, where the newest look shows nothing of the kind."""
        jumped = finding.detector == DetectorName.REWARD_HACKING and finding.severity == "info" and finding.where
        if not jumped:
            return finding
        since = finding.step if finding.since is None else finding.since
        before = [score for at, score in series.looks[:-1] if at >= since - _BEFORE]
        longer = [score for at, score in series.looks[:-1] if at >= since - _STEADY]
        visible = max(3.0 * series.noise, max(before) - min(before)) if before else math.inf
        # why longer: rewards of a replay buffer or of the last episodes tell late that the policy has become better
        if max(visible, max(longer, default=0.0) - min(longer, default=0.0)) > _PRECISE * series.gained:
            return finding
        self._jump = finding
        now, up = series.looks[-1][1], finding.value > (finding.baseline or 0.0)
        moved = now - fmean(before) if up else fmean(before) - now
        if moved > max(SUSPECTED * series.gained, visible) or _comes_closer(finding, now):
            return finding
        what = f"{finding.what}; rollouts earn {now:.3g} as before: the grader or the prompts have changed"
        return replace(finding, severity="warn", what=what)

    def parted(self, step: int, scores: Sequence[float], series: EarnedSeries) -> Finding | None:
        """A warning where the reward has jumped, and has risen since or stayed above, while rollouts fell."""
        jump, now = self._jump, fmean(scores)
        if jump is None or not self.is_close(step):
            return None
        then = next((score for at, score in series.looks if at >= jump.step), now)
        if then - now <= max(_FELL * series.gained, 2.0 * series.noise):
            return None
        readings = [reward for at, reward in self._rewards if at >= jump.step]
        if len(readings) < _FEWEST:
            return None
        half = len(readings) // 2
        first, last = fmean(readings[:half]), fmean(readings[half:])
        error = noise_of([b - a for a, b in pairwise(readings)]) * math.sqrt(2.0 / half)
        stays = jump.value > (jump.baseline or 0.0) and min(readings) > (jump.baseline or 0.0)
        if not (stays or last - first > _CERTAIN * error):
            return None
        what = (
            f"the reward went from {first:.3g} to {last:.3g} since it jumped at step {jump.step}, while rollouts fell "
        )
        what += f"from {then:.3g} to {now:.3g}: it pays for something else"
        found = Finding(
            detector=DetectorName.REWARD_HACKING, step=step, severity="warn", value=now, limit=then, what=what
        )
        return replace(found, baseline=then, since=jump.step)


def _comes_closer(finding: Finding, earned: float) -> bool:
    """Whether a reward has jumped to between what it was and what rollouts earn: a mean over episodes that are over."""
    base = finding.baseline
    return base is not None and min(base, earned) <= finding.value <= max(base, earned)


def earns_more(old: Sequence[float], current: Sequence[float]) -> bool:
    """Whether the old policy earns more than the current one, by more than chance.

    >>> earns_more([1.0, 0.9, 1.0, 0.8, 1.0, 0.9, 1.0, 1.0], [0.2, 0.1, 0.4, 0.2, 0.3, 0.2, 0.9, 0.1])
    True
    >>> earns_more([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0], [0.2, 0.1, 0.4, 0.2, 0.3, 0.2, 0.9, 0.1])
    False
    """
    better = [a - b for a, b in zip(old, current, strict=True)]
    error = stdev(better) / math.sqrt(len(better))
    mean = fmean(better)
    agree = sum(value < 0.0 for value in better) <= len(better) // ROLLOUTS
    return agree and mean > 0.0 and mean >= _PROVED * error and mean > 0.02 * abs(fmean(current))


def better_state(signals: Signals, states: Sequence[State]) -> Generator[Ask, Any, Counterfactual | None]:
    """The state whose policy earns most, if it earns more than the current one in two samples."""
    first: Scores | None = (yield Ask("scores", states=states, count=signals.step)) if states else None
    if first is None:
        return None
    current, *olds = first
    better = [(fmean(old), i) for i, old in enumerate(olds) if earns_more(old, current)]
    if not better:
        return None
    best = states[max(better)[1]]
    again: Scores | None = yield Ask("scores", states=[best], count=signals.step + _SEEDS_APART)
    if again is None or not earns_more(again[1], again[0]):
        return None
    old, now = -fmean(again[1]), -fmean(again[0])
    tried = Counterfactual(step=best.step, old_loss=old, current_loss=now, lr=best.lr, batches=len(again[0]))
    return replace(tried, rollouts=True)
