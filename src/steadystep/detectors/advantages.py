"""What a policy is taught by: groups without a difference, advantages that go against the rewards or drown all others.

These are metrics of the samples and not of the policy. They change at once where a grader or a loop breaks, while what
the policy earns falls some updates later.
"""

from collections.abc import Mapping
from statistics import fmean, median
from typing import Any, final

from steadystep.detectors.policy import NO_METRICS, Extreme, finding, policy_metrics
from steadystep.records import Finding, Severity, Signals

_GROUPS, _DEAD = 16, 0.9  # readings; share of groups
_SPREADS, _NEVER, _GONE = 64, 0.05, 1e-3  # readings; shares of the usual spread
_BEST = 0.1  # of the usual spread: how far a solved task may be from the best of late
_IN_A_ROW = 2


@final
class DeadGroups:
    """Warns when nine of ten groups have equal rewards for 16 readings; a note where the reward has risen (solved).

    At once where the spread of the rewards is gone: a thousandth of the median in two readings, after 32 without one
    that was below a twentieth, with rewards below the best of late.
    """

    name = "dead-groups"
    needs = "metrics"

    def __init__(self) -> None:
        self._shares: list[float] = []
        self._rewards: list[list[float]] = [[], []]
        """The first and the last readings."""
        self._spreads: list[float] = []
        self._gone = 0
        """Readings in a row without any spread."""
        self._told = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding when hardly any group teaches anything."""
        metrics = policy_metrics(signals) if signals.metrics else NO_METRICS
        if not metrics:
            return ()
        found = self._vanished(metrics, signals.step)
        if "reward" in metrics:
            first, last = self._rewards
            (first if len(first) < _GROUPS else last).append(metrics["reward"])
            del last[:-_GROUPS]
        return found or self._lasting(metrics, signals.step)

    def _vanished(self, metrics: Mapping[str, float], step: int) -> tuple[Finding, ...]:
        """A spread that is gone from one reading to the next: the grader gives everything the same."""
        spread, last = metrics.get("reward_std"), self._rewards[1]
        if spread is None or "reward" not in metrics:
            return ()
        known = self._spreads if len(self._spreads) >= _SPREADS // 2 else []
        usual = fmean(known) if known else 0.0
        solved = not last or metrics["reward"] >= max(last) - _BEST * usual
        if solved or not (usual > 0.0 and spread <= _GONE * usual):
            # why not a small one of a solved task: it says nothing about how equal bad answers may be
            self._spreads += [] if solved and spread < _NEVER * usual else [*[0.0] * min(self._gone, 1), spread]
            del self._spreads[:-_SPREADS]
            self._gone = 0
            return ()
        self._gone += 1
        if self._gone != _IN_A_ROW or min(known) < _NEVER * usual or self._told:
            return ()
        self._told = True
        what = f"the spread of the rewards is {spread:.3g}, its baseline is {usual:.3g}: all are equal"
        return (finding(self.name, step, "warn", spread, _GONE * usual, what, baseline=usual, since=step - 1),)

    def _lasting(self, metrics: Mapping[str, float], step: int) -> tuple[Finding, ...]:
        share = metrics.get("zero_variance_groups")
        if share is None:
            return ()
        self._shares.append(share)
        del self._shares[:-_GROUPS]
        least = min(self._shares)
        if least < 0.5 and not self._gone:
            self._told = False
        if len(self._shares) < _GROUPS or least < _DEAD or self._told:
            return ()
        self._told = True
        first, last = self._rewards
        solved = bool(last) and fmean(last) > max(first)
        what = f"{least:.0%} of the groups or more have equal rewards and teach nothing, in {_GROUPS} updates in a row"
        return (finding(self.name, step, "info" if solved else "warn", share, _DEAD, what),)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        rewards, spreads = [list(r) for r in self._rewards], list(self._spreads)
        return {
            "shares": list(self._shares),
            "rewards": rewards,
            "told": self._told,
            "spreads": spreads,
            "gone": self._gone,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._shares = [float(value) for value in state["shares"]]
        self._rewards = [[float(value) for value in part] for part in state["rewards"]]
        self._told = bool(state["told"])
        self._spreads = [float(value) for value in state.get("spreads", ())]  # earlier versions had none
        self._gone = int(state.get("gone", 0))


_AGREES, _READINGS = 0.3, 32  # correlation; readings
_PEAK = 10.0  # times the baseline
_SAME_SIGN = 0.5  # of the value: how far a policy loss may be from it


@final
class BadAdvantages:
    """Warns when advantages begin to go against the rewards that they are made of, or a few outgrow all before.

    Against: their correlation is below -0.3 in two readings, and was above 0.3 before. In the same way where a policy
    is trained on values (SAC, DDPG): its loss is minus the value it is to raise, until the sign is wrong. Outliers: the
    largest advantage is ten times its baseline in three readings.
    """

    name = "bad-advantages"
    needs = "metrics"

    def __init__(self) -> None:
        self._agreements: list[float] = []
        """Of advantages with rewards, or of what a policy loss does with values: -1 to 1."""
        self._against = 0
        """Readings in a row that go against them."""
        self._peak = Extreme(factor=_PEAK, floor=0.0, wild=float("inf"), wild_floor=float("inf"))

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding when what the policy is taught has turned, or is dominated by a few samples."""
        metrics = policy_metrics(signals) if signals.metrics else NO_METRICS
        if not metrics:
            return ()
        found: tuple[Finding, ...] = ()
        agreement = _agreement(metrics)
        if agreement is not None:
            found = self._turned(agreement, metrics, signals.step)
        peak = metrics.get("advantage_peak")
        if peak is None:
            return found
        severity, limit = self._peak.judge(peak)
        return found if severity == "info" else (*found, self._outlier(peak, limit, severity, signals.step))

    def _turned(self, agreement: float, metrics: Mapping[str, float], step: int) -> tuple[Finding, ...]:
        known = self._agreements
        usual = median(known) if len(known) >= _READINGS else 0.0
        if not (usual > _AGREES and agreement < -_AGREES):
            self._agreements, self._against = [*known[1 - 2 * _READINGS :], agreement], 0
            return ()
        self._against += 1
        if self._against != _IN_A_ROW:
            return ()
        of = "advantages with rewards" if "advantage_agreement" in metrics else "the policy's loss with less value"
        what = f"the agreement of {of} is {agreement:.2f}, its baseline is {usual:.2f}: it learns the opposite"
        return (finding(self.name, step, "warn", agreement, -_AGREES, what, baseline=usual, since=step - 1),)

    def _outlier(self, peak: float, limit: float, severity: Severity, step: int) -> Finding:
        usual, since = self._peak.level.median, step - self._peak.in_a_row + 1
        what = f"the largest advantage is {peak:.3g}, its baseline is {usual:.3g}: a few samples decide the update"
        return finding(self.name, step, severity, peak, limit, what, baseline=usual, since=since)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        peak = self._peak.state_dict()
        return {"agreements": list(self._agreements), "against": self._against, "peak": peak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._agreements = [float(value) for value in state["agreements"]]
        self._against = int(state["against"])
        self._peak.load_state_dict(state["peak"])


def _agreement(metrics: Mapping[str, float]) -> float | None:
    """Whether what is learned raises what was earned: 1 yes, -1 the opposite; None where the metrics do not tell."""
    if "advantage_agreement" in metrics:
        return metrics["advantage_agreement"]
    loss, value = metrics.get("policy_loss"), metrics.get("value_mean")
    if loss is None or value is None or "ratio_max" in metrics:  # a surrogate of ratios says nothing about its sign
        return None
    if abs(loss + value) <= _SAME_SIGN * abs(value):
        return 1.0
    return -1.0 if abs(loss - value) <= _SAME_SIGN * abs(value) else 0.0
