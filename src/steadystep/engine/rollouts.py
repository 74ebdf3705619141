"""Rollouts of a policy at a cadence: what it earns now, what it earned at its best, and the proof for a rollback.

The loss of a policy says nothing about what it earns, so batches cannot tell. One rollout every few steps, always with
the same random numbers, shows a fall; eight make sure of it. A rollback takes eight pairs with other random numbers
under the current and the best remembered weights, and eight more to confirm.
"""

import math
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, final

from steadystep.detectors.policy import is_greedy, policy_metrics
from steadystep.engine.policy_watch import ROLLOUTS, EntropyWatch, GraderWatch, Scores, better_state
from steadystep.engine.verdict import Ask, State, Verdict
from steadystep.policy import Limits, Mode
from steadystep.records import Action, DetectorName, Finding, Severity, Signals
from steadystep.rl import Controls
from steadystep.rl.earned_series import SUSPECTED, EarnedSeries

OF_A_POLICY = frozenset(
    {
        *(DetectorName.ENTROPY_COLLAPSE, DetectorName.KL_BLOW_UP, DetectorName.POLICY_MISMATCH),
        *(DetectorName.RATIO_EXPLOSION, DetectorName.REWARD_COLLAPSE, DetectorName.REWARD_HACKING),
        *(DetectorName.VALUE_DIVERGENCE, DetectorName.BAD_ADVANTAGES, DetectorName.DEAD_GROUPS),
    }
)
_CAUSES = OF_A_POLICY - {DetectorName.REWARD_COLLAPSE}
_SEED = 12  # of every look at the current policy
_FALLEN, _HEALED = 0.3, 0.15  # of what was gained
_AGAIN = 0.1  # the same after a rollback, or where a detector has seen a cause
_SURE, _LIKELY = 4.0, 2.0  # standard errors of the difference to the best level; likely is enough for an alert
_PROBATION = 500  # steps after a rollback or a cause, in which a fall counts sooner
_WATCHED, _CLOSEST = 60, 12  # steps from there, in which looks are two steps apart, or one
_MOST_FAILURES = 3
_SOONEST = 2  # steps between two looks
_HALF = 0.45  # of what was gained, nearly
_UNMOVED = 20  # steps that a fall has to last while no metric has moved: healthy policies fall for less without a cause
_ACTED_AFTER = {"again": 0, "cause": 4, "moved": 10, "policy": _UNMOVED, "diverging": 10, "values": 40}
"""Steps that a fall has to last before it is undone. Greedy values fall and recover by themselves,"""
_SETTLED = 30  # unless they have been at rest for so many looks
_HEALING, _RISING = 0.25, 0.1  # of what was lost: on the way back, and perhaps so


@final
class PolicyTrial:
    """Looks at a policy every few steps: warns when it has fallen, acts where an earlier state is proved better.

    What was earned is kept in `Controls`, which checkpoints save. Snapshots do not survive a resume, so neither does an
    open trial.
    """

    def __init__(self) -> None:
        self._controls: Controls | None = None
        self.due = math.inf
        """The step of the next look; a number, because every step asks for it."""
        self._told = False
        self._failures = 0
        self._fell: tuple[int, float] | None = None
        """Since which look the policy has been below its best level, and what it earned then."""
        self._acted: list[int] = []
        self._warned: dict[str, int] = {}
        """The last step at which a detector warned of a cause: a grader, a sampler, ratios, values."""
        self._since = sys.maxsize
        """When a fall began that was said: dips in the time after it are not usual."""
        self._seen: set[str] = set()
        """Names of metrics."""
        self._grader, self._entropy = GraderWatch(), EntropyWatch()

    @property
    def controls(self) -> Controls | None:
        """What plays; setting it arms the looks."""
        return self._controls

    @controls.setter
    def controls(self, controls: Controls) -> None:
        self._controls = controls
        self.due = 0.0 if controls.evaluate is not None and controls.every else math.inf

    def play(
        self, signals: Signals, found: tuple[Finding, ...], states: Sequence[State], mode: Mode
    ) -> Generator[Ask, Any, tuple[Signals, tuple[Finding, ...]]]:
        """Turn what detectors suspect into a warning, a note or an act, by what rollouts earn."""
        controls, step = self._controls, signals.step
        if controls is None or controls.evaluate is None or self._failures >= _MOST_FAILURES:
            return signals, found
        again = bool(controls.looks) and step - controls.looks[-1][0] < _SOONEST
        # why not all: some notes are repeated with every reading
        suspected = any(f.detector in OF_A_POLICY and not (again and _is_plain_note(f)) for f in found)
        if (not suspected and step < self.due) or signals.counterfactual is not None:
            return signals, found
        self.due = step + self._pause(step, controls.every)
        self._seen |= policy_metrics(signals).keys()
        scores: Scores | None = yield Ask("scores", count=_SEED, rollouts=1)
        if scores is None:
            self._failures += 1
            return signals, found
        series = EarnedSeries(controls.looks)
        controls.add_look(step, scores[0][0])
        if not series.known:
            return signals, tuple(map(self._unproved, found))
        yield from self._pin(series, states)
        found = tuple(self._grader.changed(f, series) for f in found)
        self._note_causes(found, series, step)
        self.due = step + self._pause(step, controls.every)
        if (now := scores[0][0]) > series.best - max(self._suspicious * series.gained, 2.0 * series.noise):
            self._fell, self._told = None, self._told and now < series.best - _HEALED * series.gained
            return signals, tuple(map(self._unproved, found))
        scores = yield Ask("scores", count=_SEED, rollouts=ROLLOUTS)
        found += () if scores is None else self._parted(step, scores[0], series)
        alert = self._alert(step)
        share, sure = (_AGAIN, _LIKELY) if alert else (_FALLEN, _SURE)
        if scores is None or series.fall(scores[0], share) < sure:
            self._fell = None
            return signals, tuple(map(self._unproved, found))
        self._fell = self._fell or (step, fmean(scores[0]))
        if step - self._fell[0] < _UNMOVED and not (alert or self._moved(step)):
            self.due = min(self.due, step + _SOONEST)
            return signals, tuple(map(self._unproved, found))
        return (yield from self._fallen(signals, found, states, mode, series, fmean(scores[0])))

    def hear(self, signals: Signals) -> None:
        """Take in reward and entropy of a step, and look at once where the entropy has risen."""
        if self.due == math.inf or not signals.metrics:
            return
        metrics = policy_metrics(signals)
        self._grader.hear(signals.step, metrics.get("reward"))
        if self._entropy.hear(signals.step, metrics.get("entropy")):
            self.due = signals.step

    def end(self, verdict: Verdict, states: Sequence[State], mode: Mode) -> Generator[Ask, Any, Verdict]:
        """A stop that puts the best policy in place as well, where rollouts prove it better than the current one."""
        controls, plan = self._controls, verdict.plan
        if Action.STOP not in plan.actions or Action.ROLLBACK in plan.actions or mode != "autopilot":
            return verdict
        if controls is None or controls.evaluate is None or len(controls.looks) < 2:
            return verdict
        held = self._best(EarnedSeries(controls.looks), states)
        tried = None if held is None else (yield from better_state(verdict.signals, [held]))
        if tried is None:
            return verdict
        return replace(verdict, plan=replace(plan, actions=(Action.ROLLBACK, Action.STOP), to=tried.step))

    def _pause(self, step: int, every: int) -> int:
        """Steps to the next look: a metric that has just moved says that the policy may follow."""
        every = every or 10 * ROLLOUTS
        if self._alert(step, _CLOSEST) or self._entropy.is_recent(step, _CLOSEST):
            return 1
        return min(every, _SOONEST) if self._alert(step, _WATCHED) or self._grader.is_close(step) else every

    def _fallen(
        self,
        signals: Signals,
        found: tuple[Finding, ...],
        states: Sequence[State],
        mode: Mode,
        series: EarnedSeries,
        now: float,
    ) -> Generator[Ask, Any, tuple[Signals, tuple[Finding, ...]]]:
        """Rollouts earn less than they did: say so, and act where the best state is proved better."""
        rest = tuple(f for f in found if f.detector != DetectorName.REWARD_COLLAPSE)
        lasts, unusual = self._lasts(signals, now, series), self._unusual(series, signals.step, now)
        quiet = self._told or (self._greedy(series) and not lasts) or not unusual
        severity: Severity = "info" if quiet else "warn"
        if severity == "warn":
            self._told, self._since = True, self._before(signals.step if self._fell is None else self._fell[0])
        said = replace(self._finding(signals, series, now, severity), where=self._causes(signals.step))
        deep = self._alert(signals.step) or series.best - now > _HALF * series.gained
        if not (lasts and unusual and deep) or mode != "autopilot":
            return signals, (*rest, said)
        held = self._best(series, states)
        tried = None if held is None else (yield from better_state(signals, [held]))
        if tried is None:
            return signals, (*rest, said)
        since = signals.step if self._fell is None else self._fell[0]
        series.looks[:] = [look for look in series.looks if look[0] < since]  # the rest is undone
        self._acted, self._fell, self._told = [*self._acted, signals.step], None, False
        return replace(signals, counterfactual=tried), (replace(said, severity="act"), *rest)

    def _note_causes(self, found: tuple[Finding, ...], series: EarnedSeries, step: int) -> None:
        """Remember warnings of a cause until the policy, some time after it, has earned more than ever."""
        self._warned = {name: at for name, at in self._warned.items() if series.best_step <= at + _WATCHED}
        self._warned |= {f.detector: step for f in found if f.detector in _CAUSES and f.severity == "warn"}

    def limited(self, limits: Limits) -> Limits:
        """The limits with the coefficients that may be raised."""
        return limits if self._controls is None else replace(limits, coefficients=self._controls.names)

    def _parted(self, step: int, scores: Sequence[float], series: EarnedSeries) -> tuple[Finding, ...]:
        """A reward that pays for something else, said once; not where values explore less and less."""
        if self._greedy(series) or step - self._warned.get(DetectorName.REWARD_HACKING, -_PROBATION) < _PROBATION:
            return ()
        found = self._grader.parted(step, scores, series)
        if found is None:
            return ()
        self._warned[found.detector] = step
        return (found,)

    def _moved(self, step: int) -> bool:
        """Whether the policy has become less certain not long ago: such a fall is no noise of small batches."""
        return self._entropy.is_recent(step, _WATCHED)

    def _greedy(self, series: EarnedSeries) -> bool:
        """Whether values are learned without a policy: what is greedy falls and recovers, unless it never has."""
        fell = int(series.looks[-1][0]) if self._fell is None else self._fell[0]
        settled = series.rest(self._before(fell)) >= _SETTLED
        return is_greedy(self._seen) and not settled

    @property
    def _suspicious(self) -> float:
        return 0.8 * _AGAIN if self._acted or self._warned else SUSPECTED

    def _alert(self, step: int, within: int = _PROBATION) -> bool:
        """Whether a policy was rolled back or a cause was seen not long ago."""
        return any(step - at <= within for at in (*self._acted, *self._warned.values()))

    def _causes(self, step: int) -> tuple[str, ...]:
        """Detectors that warned not long ago."""
        return tuple(name for name, at in self._warned.items() if step - at <= _PROBATION)

    def _unusual(self, series: EarnedSeries, step: int, now: float) -> bool:
        """Whether policies do not fall like this by themselves: one that still learns falls and recovers, some often.

        A fall with a cause, or after a rollback, is taken at its word.
        """
        since, level = self._fell or (step, now)
        before = self._before(since)
        waited = step - since >= series.patience(before) and now - level <= _RISING * (series.best - level)
        return self._alert(step) or self._moved(step) or (waited and series.best - now > series.usual_dip(before))

    def _before(self, since: int) -> int:
        """The end of what was usual: that of a fall that was said not long before."""
        return self._since if 0 <= since - self._since <= _PROBATION else since

    def _lasts(self, signals: Signals, now: float, series: EarnedSeries) -> bool:
        """Whether it has been down for long enough, and is not on its way back."""
        (since, level), step = self._fell or (signals.step, now), signals.step
        caused = bool(self._causes(step))
        kind = ("diverging" if caused else "values") if self._greedy(series) else "cause" if caused else "policy"
        kind = "moved" if kind == "policy" and self._moved(step) else kind
        kind = "again" if any(step - at <= _PROBATION for at in self._acted) else kind
        if kind == "values" and series.patience(self._before(since)):
            return False  # why: what is greedy after a few updates may earn much by luck, and little for long
        return step - since >= _ACTED_AFTER[kind] and now - level <= _HEALING * (series.best - level)

    def _unproved(self, finding: Finding) -> Finding:
        """A fall of the reward that rollouts do not show is a note."""
        collapse = finding.detector == DetectorName.REWARD_COLLAPSE and finding.severity == "warn"
        return replace(finding, severity="info") if collapse else finding

    @staticmethod
    def _finding(signals: Signals, series: EarnedSeries, now: float, severity: Severity) -> Finding:
        limit, best = series.best - _FALLEN * series.gained, series.best
        what = f"{ROLLOUTS} rollouts earn {now:.3g}, at best {best:.3g} (step {series.best_step}), at first "
        what += f"{series.looks[0][1]:.3g}"
        known: dict[str, Any] = {"value": now, "limit": limit, "baseline": best, "since": series.best_step}
        return Finding(detector=DetectorName.REWARD_COLLAPSE, step=signals.step, severity=severity, what=what, **known)

    def _best(self, series: EarnedSeries, states: Sequence[State]) -> State | None:
        """The state that earned most by the looks next to it, the newest of those that differ by noise only."""
        level = {state.step: series.level_at(state.step + 1) for state in states if state.step >= 0}
        known = [(each, state) for state in states if (each := level.get(state.step)) is not None]
        if not known:
            return None
        top = max(each for each, _ in known) - 0.5 * series.noise
        return [state for each, state in known if each >= top][-1]

    def _pin(self, series: EarnedSeries, states: Sequence[State]) -> Generator[Ask, Any, None]:
        """Keep the best state, however long ago it was."""
        best = self._best(series, states)
        if best is not None:
            yield Ask("pin", states=[best])


def _is_plain_note(finding: Finding) -> bool:
    return (finding.severity, finding.where) == ("info", ())
