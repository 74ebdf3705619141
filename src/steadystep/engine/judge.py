"""NOTICE ─► EXPLAIN ─► DECIDE: from signals to a verdict. The stages do not know each other; here they meet.

Plain numbers in, a verdict out. What the judge wants to know beyond the signals it asks for (`Needs`): whoever holds
the tensors and can run the model measures it, and asks again.
"""

from collections.abc import Container, Generator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, final

from steadystep.detectors import Detector, has_what_it_needs, occasional
from steadystep.detectors.vanishing_gradient import SuddenZero
from steadystep.diagnosis import RollbackTrial, RollbackTrialResult, first_sign, needs_counterfactual, weigh
from steadystep.diagnosis.counterfactual import GROWN, OF_THE_LOSS, as_closing, is_cleared, is_uncertain
from steadystep.diagnosis.facts import Setup
from steadystep.engine.rollouts import PolicyTrial
from steadystep.engine.verdict import (
    USUAL,
    Ask,
    BackwardCheck,
    Needs,
    State,
    Turns,
    Verdict,
    by_plan,
    conclude,
    go_on,
    held_back,
    newest_finite,
    stand_out,
)
from steadystep.policy import Budget, Limits, Mode, has_broken_weights, restorable
from steadystep.records import Action, DetectorName, Finding, Severity, Signals

_GRAVE, _UNKNOWN = ("act", "critical"), Setup()
_OF_RESTING_LOSSES = (DetectorName.CONSTANT_PREDICTION, DetectorName.NO_LEARNING)
_YOUNG = 384  # steps: before, the level of a loss has not shown how it wanders (a DQN's rises tenfold at first)
_HELD = 7  # batches that were remembered; with the one at hand they are enough
_TRIED = 3  # states, where updates are refused again and again: the newest may hold the damage already


def notice(detectors: Sequence[Detector], signals: Signals) -> tuple[Finding, ...]:
    """Show the signals to each detector and collect what they say."""
    return tuple([finding for detector in detectors for finding in detector.update(signals)])


@final
@dataclass(slots=True, kw_only=True)
class Judge:
    """From what was measured to what is to be done about it."""

    detectors: tuple[Detector, ...]
    steady: tuple[Detector, ...]
    """Those that want to see every step; the others only look at probes."""
    budget: Budget
    limits: Limits
    mode: Mode
    setup: Setup = _UNKNOWN
    trial: RollbackTrial = field(default_factory=RollbackTrial)
    turns: Turns = field(default_factory=Turns)
    policy_trial: PolicyTrial = field(default_factory=PolicyTrial)
    backward: BackwardCheck = field(default_factory=BackwardCheck)
    beginnings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name, what detectors that measure a run by its past know before the first step."""
    edition: int = field(default=0, init=False)
    """Of the weights, when this judge saw them last."""
    sudden_zero: SuddenZero = field(default_factory=SuddenZero, init=False)
    rolls: dict[tuple[bool, ...], tuple[Detector, ...]] = field(default_factory=dict, init=False)
    """Who is asked, by which of the occasional signals are there."""

    def judge(
        self,
        signals: Signals,
        *,
        updates: int,
        ceiling: float | None = None,
        careful: bool = False,
        clipped: bool = False,
    ) -> Verdict | Needs:
        """From findings to a plan.

        Args:
            signals: what was measured.
            updates: how many the weights contain: rolling back to those in place would change nothing.
            ceiling: over the learning rate, from an older trouble.
            careful: whoever asks cannot roll back.
            clipped: the loop has clipped the gradients since.
        """
        if Turns.last is not self.turns.mark or self.turns.count:
            self.turns.take()
        if self.backward.factor != 1.0:
            return go_on(self._divided(signals, updates, ceiling, careful=careful, clipped=clipped))
        # those that have something to look at: each that is called costs two microseconds
        asked = self.detectors if signals.probe is not None else self._roll(occasional(signals))
        found = notice(asked, signals)
        if signals.metrics:
            self.policy_trial.hear(signals)
        doubtful = self.sudden_zero.update(signals) or signals.step >= self.backward.due
        if found and self.turns.are_taken:  # a critic that has met its match stands still at ln 4, and that is the aim
            found = tuple([finding for finding in found if finding.detector not in _OF_RESTING_LOSSES])
        if not found and not doubtful and self.trial.finding is None and signals.step < self.policy_trial.due:
            return Verdict(signals)
        rest = self._deliberate(signals, found, updates, ceiling, careful=careful, clipped=clipped, doubtful=doubtful)
        return go_on(rest)

    def _divided(
        self, signals: Signals, updates: int, ceiling: float | None, *, careful: bool, clipped: bool
    ) -> Generator[Ask, Any, Verdict]:
        """All gradients are too large by one factor: judge them without it."""
        shown = yield from self.backward.check(signals)
        found = notice(self.detectors if signals.probe is not None else self._roll(occasional(signals)), shown)
        rest = self._deliberate(shown, found, updates, ceiling, careful=careful, clipped=clipped, doubtful=False)
        return self.backward.divided(signals, (yield from rest))

    def start_again(self, edition: int) -> None:
        """The loop has put other weights in: their past is another one."""
        self.edition = edition
        if self.trial.finding is not None:
            self.trial.close(self.trial.finding.step)
        self._learn_again(self.beginnings)

    def _roll(self, given: tuple[bool, ...]) -> tuple[Detector, ...]:
        known = self.rolls.get(given)
        return known or self.rolls.setdefault(given, tuple(e for e in self.steady if has_what_it_needs(e, given)))

    def _deliberate(
        self,
        signals: Signals,
        found: tuple[Finding, ...],
        updates: int,
        ceiling: float | None,
        *,
        careful: bool,
        clipped: bool,
        doubtful: bool,
    ) -> Generator[Ask, Any, Verdict]:
        if clipped:
            found = yield from held_back(found)
        found = (*self.backward.pending(signals.step), *found)
        signals, found = yield from self._with_weights(signals, found, doubtful=doubtful)
        damaged = has_broken_weights(found) or any(f.detector == DetectorName.DAMAGED_STATE for f in found)
        # with damaged weights also those that hold these very updates: it was none of them
        states, lr_mult = yield Ask("finite-states" if damaged else "states")
        states = states if damaged else [state for state in states if state.updates < updates]
        if self.limits.replays and not careful:
            found = yield from self.backward.explain(signals, found, states)
        if needs_counterfactual(signals, found):
            signals, found = yield from self._tried(signals, found, states, lr_mult)
        else:
            signals, found = yield from self._compared(signals, found, states, lr_mult)
        mode: Mode = "careful" if careful and self.mode == "autopilot" else self.mode
        signals, found = yield from self.policy_trial.play(signals, found, states, mode)
        if not found:
            return Verdict(signals)
        setup, limits = replace(self.setup, clips=clipped or self.setup.clips), self.policy_trial.limited(self.limits)
        verdict = conclude(
            signals, found, budget=self.budget, limits=limits, states=states, mode=mode, ceiling=ceiling, setup=setup
        )
        verdict = yield from self.policy_trial.end(verdict, states, mode if limits.rolls_back else "careful")
        verdict = yield from self.backward.wait(signals, verdict, states)
        self._learn_again((DetectorName.LOST_MOMENTS,) if Action.RESTORE_MOMENTS in verdict.plan.actions else ())
        if Action.ROLLBACK in verdict.plan.actions and self.trial.finding is not None:
            self.trial.close(signals.step)  # what was compared with are other weights from now on
        return verdict

    def _with_weights(
        self, signals: Signals, found: tuple[Finding, ...], *, doubtful: bool
    ) -> Generator[Ask, Any, tuple[Signals, tuple[Finding, ...]]]:
        """What looks like a bad batch may be the weights: they are looked at now, and not at the next cadence."""
        # why a jump of the loss too: a zeroed embedding is half learned again by the next look at the weights
        doubtful = doubtful or any(f.severity in _GRAVE or f.detector == DetectorName.LOSS_SPIKE for f in found)
        if doubtful and not signals.weight_norms:
            signals = yield Ask("weight-norms")
            found += notice([each for each in self.steady if each.name == DetectorName.WEIGHT_JUMP], signals)
        return signals, found

    def _learn_again(self, names: Container[str]) -> None:
        for detector in self.detectors:
            if detector.name in names and detector.name in self.beginnings:
                detector.load_state_dict(deepcopy(dict(self.beginnings[detector.name])))

    def _tried(
        self, signals: Signals, found: tuple[Finding, ...], states: list[State], lr_mult: float
    ) -> Generator[Ask, Any, tuple[Signals, tuple[Finding, ...]]]:
        """The batch at hand under the states that a rollback could restore, the newest that does better first."""
        known = self._restorable(signals, found, states, lr_mult)[-_TRIED:]
        tried = None
        if known:  # after refused updates gradient and buffers count too: a flipped bit may show there only
            losses = yield Ask("losses", states=known, backward=signals.refused_in_a_row > 0)
            tried = None if losses is None else newest_finite(known, losses)
        signals = replace(signals, counterfactual=tried)
        weighed, jump = weigh(signals, found), DetectorName.WEIGHT_JUMP
        return signals, tuple(f if f.detector == jump or not is_uncertain(f) else self._untried(f) for f in weighed)

    def _compared(
        self, signals: Signals, found: tuple[Finding, ...], states: list[State], lr_mult: float
    ) -> Generator[Ask, Any, tuple[Signals, tuple[Finding, ...]]]:
        """A loss that stays high is acted upon when the state to be restored does better on several batches."""
        trial = self.trial
        over = next((f for f in found if f.detector == DetectorName.SAME_BATCH and f.severity == "act"), None)
        before = [] if over is None else self._restorable(signals, (over,), states, lr_mult)
        if over is not None and (yield from self._was_garbage(over, before)):
            return signals, tuple(f for f in found if f is over or not is_uncertain(f))
        lasting = tuple(filter(is_uncertain, found))
        loud = tuple(finding for finding in lasting if finding.severity != "info")
        # why not where guards take turns: it could not be told, and running old closures again may have side effects
        suspected = trial.candidates(loud, lasting, replays=self.limits.replays)
        if suspected and trial.finding is None and not self.turns.are_taken:
            yield from self._begin(suspected[0], self._restorable(signals, suspected, states, lr_mult))
        rest = tuple(finding for finding in found if not is_uncertain(finding))
        if trial.finding is None:
            return signals, (*rest, *(trial.once(self._untried(finding)) for finding in lasting))
        for finding in loud:
            trial.heard(finding)
        state = next((state for state in states if state.step == trial.state), None)
        if state is None or (losses := (yield Ask("losses", states=[state]))) is None:  # only the curve can tell
            return signals, (*rest, trial.once(self._untried(trial.close(signals.step))))
        result = trial.add(old_loss=losses[1], current_loss=losses[0])
        if result == "gathering":
            return signals, rest + tuple(replace(finding, severity="info") for finding in lasting)
        signals, of_data = replace(signals, counterfactual=trial.counterfactual), trial.is_of_data
        suspect = trial.close(signals.step)
        if suspect.severity == "info":  # nobody has warned: it is acted upon where batches were bad, or kept silent
            if result != "confirmed" or not of_data:
                return signals, rest + lasting
            suspect = replace(suspect, severity="act")
        told = replace(suspect, severity=(yield from self._severity(result, state, suspect)))
        if told.severity != "act" and self._may_replay(signals, suspect) and (yield Ask("repeats", states=[state])):
            told, signals = replace(told, severity="act"), as_closing(signals)
        return signals, (*rest, trial.once(told))

    def _begin(self, suspected: Finding, known: list[State]) -> Generator[Ask, Any, None]:
        """Suspect it, if there is a state that a rollback could restore."""
        replays = self.limits.replays
        if suspected.detector == DetectorName.SAME_BATCH and not replays:
            return  # what came after it would be lost
        if not known or not self.trial.begin(suspected, state=known[-1].step, lr=known[-1].lr, replays=replays):
            return
        if suspected.detector == DetectorName.WEIGHT_JUMP:
            # why at once: what damaged the weights from outside is over, and each step with them is wasted
            for old, current in (yield Ask("remembered-losses", states=known[-1:], count=_HELD)):
                self.trial.add(old_loss=old, current_loss=current)

    def _was_garbage(self, over: Finding, known: list[State]) -> Generator[Ask, Any, bool]:
        """Identical batches, each of them far too high for the weights from before: there was nothing to learn."""
        if not known or not self.limits.replays or self.turns.are_taken:
            return False
        count = int(over.value)
        losses = yield Ask("remembered-losses", states=known[-1:], count=USUAL + count)
        return stand_out([old for old, _ in losses], count)

    def _severity(self, result: RollbackTrialResult, state: State, suspected: Finding) -> Generator[Ask, Any, Severity]:
        """A rollback pays where the objective is still what it was: no adversary, no target network has moved.

        Where that cannot be told, only a jump is acted upon.
        """
        confirmed = result == "confirmed"
        if suspected.detector == DetectorName.WEIGHT_JUMP:
            return "act" if confirmed and not self.turns.are_taken else "warn"
        repeats = yield Ask("repeats", states=[state])
        if suspected.detector == DetectorName.SAME_BATCH:  # it was said when it began
            return "act" if confirmed and repeats and not self.turns.are_taken else "info"
        healed = result == "healing" and suspected.severity != "act"
        if repeats is False or self.turns.are_taken or healed:
            return "info"
        # why: older weights do no better on a loss that has multiplied, so returns or targets have grown
        grown = suspected.baseline is not None and suspected.value > GROWN * suspected.baseline
        worse_than_best = suspected.detector == DetectorName.WORSE_THAN_BEST
        if (grown and result == "cleared") or (worse_than_best and not confirmed):
            return "info"
        pays = repeats or suspected.detector == DetectorName.NOT_HEALING
        return "act" if confirmed and suspected.severity == "act" and pays and not worse_than_best else "warn"

    def _may_replay(self, signals: Signals, suspected: Finding) -> bool:
        """A replay costs nothing but time, and shows whether something went wrong outside of closures and batches."""
        asks = self.limits.replays and not self.turns.are_taken and suspected.detector in OF_THE_LOSS
        asks = asks and self.budget.last_target(signals.step) is None and not is_cleared(signals)
        return asks and self.trial.may_replay(signals.step)

    def _untried(self, finding: Finding) -> Finding:
        """What a curve alone says is a warning at most, and a note in a run that is too young to know its own ways.

        Whoever asked only to be told is told sooner.
        """
        begun = finding.step if finding.since is None else finding.since
        young = finding.detector != DetectorName.WEIGHT_JUMP and begun < _YOUNG
        uncertain = (finding.detector == DetectorName.WORSE_THAN_BEST or young) and self.mode != "observe"
        said = finding.detector == DetectorName.SAME_BATCH
        if finding.severity == "info" or uncertain or said or self.turns.are_taken:
            return replace(finding, severity="info")
        return replace(finding, severity="warn")

    def _restorable(
        self, signals: Signals, found: tuple[Finding, ...], states: list[State], lr_mult: float
    ) -> list[State]:
        """Those from before the trouble; not one from a time of lower learning rate, when the rise was planned."""
        before = self.budget.episode.began(signals.step, first_sign(found))
        known = restorable(states, before=before, step=signals.step, budget=self.budget, limits=self.limits)
        return [state for state in known if not by_plan(state, signals.lr * lr_mult, signals.announced_lr)]
