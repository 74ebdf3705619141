"""What a policy earns against what it earned: collapse, and reward hacking."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any, final

from steadystep.detectors.policy import NO_METRICS, finding, is_greedy, policy_metrics
from steadystep.records import Finding, Severity, Signals
from steadystep.rl import RewardJump, noise_of

_SERIES = {"reward": 2, "held_out_reward": 1}  # readings per block: evaluations are means of many rollouts already
_SMOOTH, _RECENT, _FEWEST, _DIFFERENCES = 3, 2, 9, 64  # blocks
_NOTED, _LOST, _BACK = 0.25, 0.4, 0.15  # of what was gained
_NOISE = 5.0  # standard deviations of a block


@final
class RewardCollapse:
    """Warns when the reward, or the held-out one, has lost 40 % of its gain, and more than its own noise explains.

    Readings that repeat the last one (several updates per rollout) count once. The guard rolls back only where rollouts
    of an earlier state earn more; a note comes earlier, so that such a state is kept. It stays a note where values are
    learned without a policy (DQN).
    """

    name = "reward-collapse"
    needs = "metrics"

    def __init__(self) -> None:
        self._series = {name: _Fall(name, block) for name, block in _SERIES.items()}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding when a reward has fallen from its best level."""
        metrics = policy_metrics(signals) if signals.metrics else NO_METRICS
        found = [each.add(metrics[name], signals.step) for name, each in self._series.items() if name in metrics]
        # why: where values are learned and no policy, what is greedy changes all at once, and falls that heal are usual
        greedy = is_greedy(metrics.keys())
        return tuple(replace(f, severity="info") if greedy else f for f in found if f is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {name: each.state_dict() for name, each in self._series.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name, each in self._series.items():
            each.load_state_dict(state[name])


@final
class _Fall:
    """One series of rewards, in blocks."""

    def __init__(self, name: str, block: int) -> None:
        self._name, self._size = name.replace("_", " ").replace("held out", "held-out"), block
        self._last = math.nan
        self._block: list[float] = []
        self._blocks: list[float] = []
        self._differences: list[float] = []
        self._first, self._best, self._best_step = math.nan, -math.inf, -1
        self._told = 0
        """1 after a note, 2 after a warning."""

    def add(self, value: float, step: int) -> Finding | None:
        """One reading."""
        if (value == self._last and self._size > 1) or abs(value) > 1e30:
            return None
        self._last = value
        self._block.append(value)
        if len(self._block) < self._size:
            return self._low(value, step)
        mean, self._block = fmean(self._block), []
        if self._blocks:
            self._differences.append(mean - self._blocks[-1])
            del self._differences[:-_DIFFERENCES]
        self._blocks.append(mean)
        del self._blocks[:-_SMOOTH]
        return self._look(step) if len(self._blocks) == _SMOOTH else None

    def _low(self, value: float, step: int) -> Finding | None:
        """A note for a single reading far below the best level: rollouts can tell at once what it means."""
        if len(self._differences) < _FEWEST or math.isnan(self._first):
            return None
        limit = self._best - max(
            _NOTED * (self._best - self._first), 4.0 * math.sqrt(self._size) * noise_of(self._differences)
        )
        what = f"the {self._name} is {value:.3g}, its best level is {self._best:.3g}"
        return finding(RewardCollapse.name, step, "info", value, limit, what) if value < limit else None

    def _look(self, step: int) -> Finding | None:
        level = fmean(self._blocks)
        if math.isnan(self._first):
            self._first = level
        if level > self._best:
            self._best, self._best_step = level, step
        if len(self._differences) < _FEWEST:
            return None
        noise, now, gained = noise_of(self._differences), fmean(self._blocks[-_RECENT:]), self._best - self._first
        drop = self._best - now
        if drop < max(_BACK * gained, noise):
            self._told = 0
            return None
        # why: with nothing gained yet, only a fall well below the beginning counts
        least = max((_NOISE if gained > 3.0 * noise else 2.0 * _NOISE) * noise, 1e-9 * abs(self._best))
        lost = drop > max(_LOST * gained, least) and self._blocks[-1] <= self._blocks[-2] + noise
        noted = drop > max(_NOTED * gained, 0.8 * least)
        if not noted or (self._told == 2 and not lost):
            return None
        severity: Severity = "warn" if lost and self._told < 2 else "info"
        self._told = max(self._told, 2 if severity == "warn" else 1)
        what = f"the {self._name} fell from {self._best:.3g} to {now:.3g}; the run began at {self._first:.3g}"
        known: dict[str, Any] = {"baseline": self._best, "since": self._best_step}
        return finding(RewardCollapse.name, step, severity, now, self._best - _LOST * gained, what, **known)

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": None if math.isnan(self._last) else self._last,
            "block": list(self._block),
            "blocks": list(self._blocks),
            "differences": list(self._differences),
            "levels": [self._first, self._best, self._best_step] if self._best_step >= 0 else None,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = math.nan if state["last"] is None else float(state["last"])
        self._block, self._blocks = [float(v) for v in state["block"]], [float(v) for v in state["blocks"]]
        self._differences = [float(v) for v in state["differences"]]
        first, best, at = state["levels"] or (math.nan, -math.inf, -1)
        self._first, self._best, self._best_step, self._told = float(first), float(best), int(at), int(state["told"])


_PAIRS, _EDGE, _LATEST = 64, 4, 2  # held-out readings: in all, at their best, and the last ones
_FALLEN = 0.25  # of what the held-out reward had gained, or of its size


@final
class RewardHacking:
    """Warns when the reward rises while the held-out (or KL-adjusted) reward falls, or responses fill up to the limit.

    Compares the mean of the last two held-out readings with the best mean of four.
    """

    name = "reward-hacking"
    needs = "metrics"

    def __init__(self) -> None:
        self._rewards: list[float] = []
        """Since the last held-out reading."""
        self._pairs: list[list[float]] = []
        """Mean reward, held-out reward and step."""
        self._lengths: list[list[float]] = [[], []]
        """Share of truncated responses: the first and the last readings."""
        self._told: list[str] = []
        self._jump = RewardJump()

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding when the reward and what it stands for part."""
        metrics = policy_metrics(signals) if signals.metrics else NO_METRICS
        found: tuple[Finding, ...] = ()
        if "reward" in metrics:
            found = self._jumped(metrics["reward"], signals.step)
            self._rewards.append(metrics["reward"])
            del self._rewards[:-_PAIRS]
        held = metrics.get("held_out_reward", metrics.get("adjusted_reward"))
        if held is not None and self._rewards:
            self._pairs.append([fmean(self._rewards), held, float(signals.step)])
            self._rewards = []
            del self._pairs[1:-_PAIRS]  # the first one stays: what was gained is measured from there
            parted = self._part(signals.step)
            # why: rewards of episodes that are over, with less and less exploration, rise while greedy values fall
            found += tuple(replace(f, severity="info") for f in parted) if is_greedy(metrics.keys()) else parted
        return found + self._long(metrics, signals.step)

    def _jumped(self, value: float, step: int) -> tuple[Finding, ...]:
        """A note: rollouts can tell whether the policy has changed as well."""
        jump = self._jump.add(value, step)
        if jump is None:
            return ()
        what, known = f"the reward jumped from {jump[0]:.3g} to {value:.3g}", {"baseline": jump[0], "since": jump[2]}
        return (finding(self.name, step, "info", value, jump[1], what, where=("reward",), **known),)

    def _part(self, step: int) -> tuple[Finding, ...]:
        pairs = self._pairs
        if len(pairs) < 3 * _EDGE:
            return ()
        levels = [fmean(p[1] for p in pairs[i : i + _EDGE]) for i in range(len(pairs) - _EDGE + 1)]
        at = max(range(len(levels)), key=levels.__getitem__)
        best, last = pairs[at : at + _EDGE], pairs[-_LATEST:]
        now, doubt = fmean(p[1] for p in last), math.sqrt(1.0 / _EDGE + 1.0 / _LATEST)
        fell, rose = levels[at] - now, fmean(p[0] for p in last) - fmean(p[0] for p in best)
        noise = [noise_of([b[i] - a[i] for a, b in pairwise(pairs)], least=1.0) for i in (0, 1)]
        gained = levels[at] - pairs[0][1]
        enough = fell > max(_FALLEN * max(gained, 0.1 * abs(levels[at])), 4.0 * noise[1] * doubt)
        if not (enough and rose > 2.0 * noise[0] * doubt):
            if fell < 0.5 * _FALLEN * gained and "held-out" in self._told:
                self._told.remove("held-out")
            return ()
        what = f"the reward rose from {fmean(p[0] for p in best):.3g} to {fmean(p[0] for p in last):.3g} while the "
        what += f"held-out reward fell from {levels[at]:.3g} to {now:.3g}"
        severity: Severity = "info" if "held-out" in self._told else "warn"
        self._told = sorted({*self._told, "held-out"})
        since = int(best[-1][2])
        limit = levels[at] - _FALLEN * gained
        return (finding(self.name, step, severity, now, limit, what, baseline=levels[at], since=since),)

    def _long(self, metrics: Mapping[str, float], step: int) -> tuple[Finding, ...]:
        """Responses that fill up to the limit, where they did not at first."""
        share = metrics.get("truncated_share")
        if share is None:
            return ()
        first, last = self._lengths
        (first if len(first) < 16 else last).append(share)
        del last[:-16]
        if len(last) < 16 or "length" in self._told or not (fmean(first) < 0.2 and fmean(last) > 0.6):
            return ()
        self._told = sorted({*self._told, "length"})
        what = f"{fmean(last):.0%} of the responses are cut off at the length limit, {fmean(first):.0%} were at first"
        return (finding(self.name, step, "warn", fmean(last), 0.6, what, baseline=fmean(first)),)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        pairs, lengths = [list(pair) for pair in self._pairs], [list(part) for part in self._lengths]
        jump = self._jump.state_dict()
        return {"rewards": list(self._rewards), "pairs": pairs, "lengths": lengths, "told": list(self._told), **jump}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._rewards = [float(v) for v in state["rewards"]]
        self._pairs = [[float(v) for v in pair] for pair in state["pairs"]]
        self._lengths = [[float(v) for v in part] for part in state["lengths"]]
        self._told = [str(name) for name in state["told"]]
        self._jump.load_state_dict(state)
