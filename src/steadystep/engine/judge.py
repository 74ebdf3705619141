"""NOTICE ─► EXPLAIN ─► DECIDE for one look. The stages do not know each other; here they meet."""

from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, final

from steadystep.actions import LearningRate
from steadystep.detectors import (
    ConstantPrediction,
    DamagedState,
    Detector,
    LossSpike,
    LostMoments,
    NoLearning,
    WeightJump,
    has_what_it_needs,
    occasional,
)
from steadystep.detectors.vanishing_gradient import SuddenZero
from steadystep.diagnosis import (
    LASTING,
    RollbackTrial,
    RollbackTrialResult,
    explain,
    first_sign,
    needs_counterfactual,
    weigh,
)
from steadystep.engine.ownership import Turns
from steadystep.engine.rollback import Recovery
from steadystep.policy import Budget, Limits, Mode, decide, has_broken_weights, restorable
from steadystep.records import Action, DetectorName, Diagnosis, Finding, Plan, Severity, Signals
from steadystep.signals.gradients import GradientView
from steadystep.signals.weight_edits import WeightEdits
from steadystep.snapshots.snapshots import Snapshot

_GRAVE = ("act", "critical")
_OF_RESTING_LOSSES = (ConstantPrediction.name, NoLearning.name)
_HEALTHY = (Diagnosis(), Plan())  # what nearly every step comes to; made once
_YOUNG = 384  # steps: before, the level of a loss has not shown how it wanders (a DQN's rises tenfold at first)
_HELD = 7  # batches that were remembered; with the one at hand they are enough
_GROWN = 2.0  # times what it was
_TRIED = 3  # states, where updates are refused again and again: the newest may hold the damage already


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """From what was measured to what is to be done about it."""

    detectors: tuple[Detector, ...]
    budget: Budget
    recovery: Recovery
    learning_rate: LearningRate
    limits: Limits
    mode: Mode
    steady: tuple[Detector, ...]
    """Those that want to see every step; the others only look at probes."""
    weigh: Callable[[Signals], Signals]
    """Adds the norms of the weights, which healthy steps are not asked for."""
    evidence: RollbackTrial = field(default_factory=RollbackTrial)
    turns: Turns = field(default_factory=Turns)
    sudden_zero: SuddenZero = field(default_factory=SuddenZero, init=False)
    edits: WeightEdits = field(default_factory=WeightEdits.none)
    """Weights that the loop replaces by itself."""
    edition: list[int] = field(default_factory=lambda: [0], init=False)
    """Of the weights, when this judge saw them last."""
    beginnings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name, what detectors that measure a run by its past know before the first step."""
    rolls: dict[tuple[bool, ...], tuple[Detector, ...]] = field(default_factory=dict, init=False)
    """Who is asked, by which of the occasional signals are there."""

    def judge(
        self,
        view: GradientView,
        *,
        updates: int,
        careful: bool = False,
        clipped_norm: Callable[[GradientView], float] | None = None,
    ) -> tuple[Diagnosis, Plan]:
        """From findings to a plan.

        Args:
            view: what was measured.
            updates: how many the weights contain: going back to those in place would change nothing.
            careful: whoever asks cannot roll back.
            clipped_norm: measures the gradients again, where the loop has clipped them since.
        """
        self.turns.take()
        if self.edits.edition() != self.edition[0]:
            self._start_again()
        asked = self._asked(view.signals) if view.signals.probe is None else self.detectors
        found = tuple([finding for detector in asked for finding in detector.update(view.signals)])
        if found and self.turns.are_taken:  # a critic that has met its match stands still at ln 4, and that is the aim
            found = tuple([finding for finding in found if finding.detector not in _OF_RESTING_LOSSES])
        doubtful = self.sudden_zero.update(view.signals)
        if not found and not doubtful and self.evidence.finding is None:
            return _HEALTHY
        if clipped_norm is not None:
            found = _held_back(view, found, clipped_norm)
        # why a jump of the loss too: a zeroed embedding is half learned again by the next look at the weights
        doubtful = doubtful or any(f.severity in _GRAVE or f.detector == LossSpike.name for f in found)
        if doubtful and not view.signals.weight_norms:
            found += self._about_weights(view)
        if has_broken_weights(found) or any(finding.detector == DamagedState.name for finding in found):
            # also those that hold these very updates: it was none of them
            states = self.recovery.finite_states()
        else:
            states = [state for state in self.recovery.states if state.updates < updates]
        if needs_counterfactual(view.signals, found):
            found = self._tried(view, found, states)
        else:
            found = self._compared(view, found, states)
        if not found:
            return _HEALTHY
        diagnosis = explain(view.signals, found)
        self.budget.see(diagnosis)
        plan = decide(
            view.signals,
            diagnosis,
            budget=self.budget,
            mode="careful" if careful and self.mode == "autopilot" else self.mode,
            states=states,
            limits=self.limits,
            ceiling=self.learning_rate.ceiling.lr,
        )
        if Action.RESTORE_MOMENTS in plan.actions:  # what they fall to is our doing
            self._learn_again((LostMoments.name,))
        if Action.ROLLBACK in plan.actions and self.evidence.finding is not None:
            self.evidence.close(view.signals.step)  # what was compared with are other weights from now on
        return diagnosis, plan

    def _asked(self, signals: Signals) -> tuple[Detector, ...]:
        """Of the steady ones those that have something to look at: each that is called costs two microseconds."""
        given = occasional(signals)
        asked = self.rolls.get(given)
        if asked is None:
            asked = self.rolls[given] = tuple(each for each in self.steady if has_what_it_needs(each, given))
        return asked

    def _start_again(self) -> None:
        """The loop has put other weights in: their past is another one, and there is nothing to go back to."""
        self.edition[0] = self.edits.edition()
        self.recovery.forget()
        if self.evidence.finding is not None:
            self.evidence.close(self.evidence.finding.step)
        self._learn_again(self.beginnings)

    def _learn_again(self, names: Container[str]) -> None:
        for detector in self.detectors:
            if detector.name in names and detector.name in self.beginnings:
                detector.load_state_dict(deepcopy(dict(self.beginnings[detector.name])))

    def _about_weights(self, view: GradientView) -> tuple[Finding, ...]:
        """What looks like a bad batch may be the weights: then they are looked at now, and not at the next cadence."""
        view.signals = self.weigh(view.signals)
        asked = [detector for detector in self.steady if detector.name == WeightJump.name]
        return tuple(finding for detector in asked for finding in detector.update(view.signals))

    def _tried(self, view: GradientView, found: tuple[Finding, ...], states: list[Snapshot]) -> tuple[Finding, ...]:
        """The batch at hand under the states that a rollback could restore, the newest that does better first."""
        known = self._restorable(view.signals, found, states)[-_TRIED:]
        counterfactual = self.recovery.testify(view.signals, known)
        view.signals = replace(view.signals, counterfactual=counterfactual)
        weighed = weigh(view.signals, found)
        return tuple(f if f.detector == WeightJump.name or not _is_uncertain(f) else self._untried(f) for f in weighed)

    def _compared(self, view: GradientView, found: tuple[Finding, ...], states: list[Snapshot]) -> tuple[Finding, ...]:
        """A loss that stays high is acted upon when the state to be restored does better on several batches."""
        evidence, step = self.evidence, view.signals.step
        lasting = tuple(filter(_is_uncertain, found))
        loud = tuple(finding for finding in lasting if finding.severity != "info")
        # why not where guards take turns: it could not be told, and running old closures again may have side effects
        if loud and evidence.finding is None and not self.turns.are_taken:
            self._begin(loud[0], self._restorable(view.signals, loud, states))
        rest = tuple(finding for finding in found if not _is_uncertain(finding))
        if evidence.finding is None:
            return (*rest, *(evidence.once(self._untried(finding)) for finding in lasting))
        for finding in loud:
            evidence.heard(finding)
        state = next((state for state in states if state.step == evidence.state), None)
        pair = None if state is None else self.recovery.compare(state)
        if state is None or pair is None:  # it cannot be told: what the curve says is what there is
            suspected = evidence.close(step)
            return (*rest, evidence.once(self._untried(suspected)))
        verdict = evidence.add(old_loss=pair[0], current_loss=pair[1])
        if verdict == "gathering":
            return rest + tuple(replace(finding, severity="info") for finding in lasting)
        view.signals = replace(view.signals, counterfactual=evidence.counterfactual)
        suspected = evidence.close(step)
        return (*rest, evidence.once(replace(suspected, severity=self._severity(verdict, state, suspected))))

    def _begin(self, suspected: Finding, known: list[Snapshot]) -> None:
        """Suspect it, if there is a state that a rollback could restore."""
        if not known or not self.evidence.begin(suspected, state=known[-1].step, lr=known[-1].lr):
            return
        if suspected.detector == WeightJump.name:
            # why at once: what damaged the weights from outside is over, and each step with them is wasted
            for then, now in self.recovery.held(known[-1], _HELD):
                self.evidence.add(old_loss=then, current_loss=now)

    def _severity(self, verdict: RollbackTrialResult, state: Snapshot, suspected: Finding) -> Severity:
        """Going back pays where the objective is still what it was: no adversary, no target network has moved.

        Where that cannot be told, only a jump is acted upon.
        """
        confirmed = verdict == "confirmed"
        if suspected.detector == DetectorName.WEIGHT_JUMP:
            return "act" if confirmed and not self.turns.are_taken else "warn"
        repeats = self.recovery.repeats(state)
        healed = verdict == "healing" and suspected.severity != "act"
        if repeats is False or self.turns.are_taken or healed:
            return "info"
        # why: older weights do no better on a loss that has multiplied, so returns or targets have grown
        grown = (
            verdict == "cleared" and suspected.baseline is not None and suspected.value > _GROWN * suspected.baseline
        )
        if grown or (suspected.detector == DetectorName.WORSE_THAN_BEST and not confirmed):
            return "info"
        if suspected.detector == DetectorName.WORSE_THAN_BEST:
            return "warn"
        pays = repeats or suspected.detector == DetectorName.NOT_HEALING
        return "act" if confirmed and suspected.severity == "act" and pays else "warn"

    def _untried(self, finding: Finding) -> Finding:
        """What a curve alone says is a warning at most, and a note in a run that is too young to know its own ways.

        Whoever asked only to be told is told sooner.
        """
        begun = finding.step if finding.since is None else finding.since
        uncertain = finding.detector == DetectorName.WORSE_THAN_BEST or (
            finding.detector != WeightJump.name and begun < _YOUNG
        )
        uncertain = uncertain and self.mode != "observe"
        if finding.severity == "info" or uncertain or self.turns.are_taken:
            return replace(finding, severity="info")
        return replace(finding, severity="warn")

    def _restorable(self, signals: Signals, found: tuple[Finding, ...], states: list[Snapshot]) -> list[Snapshot]:
        before = self.budget.episode.began(signals.step, first_sign(found))
        known = restorable(states, before=before, step=signals.step, budget=self.budget, limits=self.limits)
        return self.recovery.comparable(signals, known)


def _is_uncertain(finding: Finding) -> bool:
    """Only a comparison can confirm it; a weight that is no longer finite needs none."""
    certain = finding.detector == WeightJump.name and finding.severity == "act"
    return finding.detector in LASTING and not certain


def _held_back(
    view: GradientView, found: tuple[Finding, ...], clipped_norm: Callable[[GradientView], float]
) -> tuple[Finding, ...]:
    """A spike that the loop's own clipping has brought under the limit is a note."""
    spike = next((f for f in found if f.detector == DetectorName.GRADIENT_SPIKE and f.severity == "act"), None)
    if spike is None or not clipped_norm(view) <= spike.limit:
        return found
    note = replace(spike, severity="info", what=f"{spike.what}, held by your clipping")
    return tuple(note if finding is spike else finding for finding in found)
