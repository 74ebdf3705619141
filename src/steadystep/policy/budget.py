"""How much trouble is too much."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from steadystep._utils.text import state_of
from steadystep.errors import TrainingHalted
from steadystep.policy.trusted_snapshots import Episode
from steadystep.records import Action, ActionName, Damage, DetectorName, Diagnosis, Outcome, Plan, Quarantined, Signals

_SKIP_WINDOW = 200  # attempts
_ROLLBACK_WINDOW = 1000  # attempts
_QUARANTINE = 1000  # entries
_AGAIN_STEPS = 500  # a rollback this soon after another one means that the last one did not reach back far enough


@final
class Budget:
    """Counts refused updates and rollbacks in a window; each kind has a limit of its own."""

    def __init__(self, *, max_skips_in_a_row: int = 20, max_skips: int = 100, max_rollbacks: int = 3) -> None:
        self.max_skips_in_a_row = max_skips_in_a_row
        self.max_skips = max_skips
        self.max_rollbacks = max_rollbacks
        self.skips_in_a_row = 0
        self.refused_in_a_row = 0
        """As `skips_in_a_row`, without the overflows that are a loss scaler's routine."""
        self.episode = Episode()
        self._skips: list[int] = []
        self._rollbacks: list[tuple[int, int]] = []
        self._raised: list[int] = []
        self.quarantined: tuple[Quarantined, ...] = ()
        """Batches that are not in the weights, oldest first; the last 1,000 of them."""

    def see(self, diagnosis: Diagnosis) -> None:
        """Take in what was found, before deciding about it."""
        if diagnosis.findings:
            self.episode.note(diagnosis.findings)

    def skips_spent(self, step: int) -> bool:
        """One more refusal would be the one too many."""
        recent = sum(step - skip < _SKIP_WINDOW for skip in self._skips)
        return self.skips_in_a_row + 1 >= self.max_skips_in_a_row or recent + 1 >= self.max_skips

    def rollbacks_spent(self, step: int) -> bool:
        """No rollback is left in this window."""
        return sum(step - at < _ROLLBACK_WINDOW for at, _ in self._rollbacks) >= self.max_rollbacks

    def rollbacks_left(self, step: int) -> int:
        """How many may still be made in this window."""
        return self.max_rollbacks - sum(step - at < _ROLLBACK_WINDOW for at, _ in self._rollbacks)

    def raised(self, step: int) -> int:
        """Book an exception at `step`; returns how many there were in the last 1,000 steps, this one included."""
        self._raised = [*(at for at in self._raised if step - at < _ROLLBACK_WINDOW), step]
        return len(self._raised)

    def last_target(self, step: int) -> int | None:
        """Where the last rollback went, if that is so recent that it has not helped."""
        if not self._rollbacks:
            return None
        at, to = self._rollbacks[-1]
        return to if step - at < _AGAIN_STEPS else None

    def count(self, outcome: Outcome) -> None:
        """Book the outcome of one attempt."""
        if outcome.quarantined:
            self.quarantined = (*self.quarantined, *outcome.quarantined)[-_QUARANTINE:]
        if outcome.stepped:
            self.skips_in_a_row = self.refused_in_a_row = 0
            return
        if outcome.plan.to is not None and outcome.restored is not None:
            recent = [(at, to) for at, to in self._rollbacks if outcome.step - at < _ROLLBACK_WINDOW]
            self._rollbacks = [*recent, (outcome.step, outcome.plan.to)]
            self.skips_in_a_row = self.refused_in_a_row = 0
            self.episode.close()
            return
        self.skips_in_a_row += 1
        self.refused_in_a_row += Action.BACK_OFF_SCALE not in outcome.plan.actions
        self._skips = [*(skip for skip in self._skips if outcome.step - skip < _SKIP_WINDOW), outcome.step]

    def halt(self, outcome: Outcome) -> TrainingHalted:
        """The error that ends the run."""
        did = [f"skipped {self.skips_in_a_row} updates in a row" if self.skips_in_a_row > 1 else "skipped the update"]
        recent = [to for at, to in self._rollbacks if outcome.step - at < _ROLLBACK_WINDOW]
        if recent:
            did.insert(0, f"rolled back to {', '.join(state_of(to) for to in recent)}")
        where = "the weights are those after the last accepted update"
        if outcome.restored is not None and outcome.plan.to is not None:
            where = f"the weights of {state_of(outcome.plan.to)} are in place"
        elif outcome.diagnosis.damage is Damage.WEIGHTS:
            where = "no better weights are in memory or in a checkpoint of this run: load one of your own checkpoints"
        where += f"; `steadystep replay {outcome.incident}` re-runs this step" if outcome.incident else ""
        return TrainingHalted(
            step=outcome.step,
            what=f"{outcome.diagnosis.evidence} [{outcome.diagnosis.cause}]" + _began(outcome),
            did=f"{', '.join(did)}; {where}",
            try_next=outcome.diagnosis.advice,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "skips_in_a_row": self.skips_in_a_row,
            "refused_in_a_row": self.refused_in_a_row,
            "skips": list(self._skips),
            "rollbacks": [list(pair) for pair in self._rollbacks],
            "raised": list(self._raised),
            "quarantined": [[q.step, q.cause, q.epoch, list(q.batches)] for q in self.quarantined],
            "episode": self.episode.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.skips_in_a_row = int(state["skips_in_a_row"])
        self.refused_in_a_row = int(state["refused_in_a_row"])
        self._skips = [int(step) for step in state["skips"]]
        self._rollbacks = [(int(at), int(to)) for at, to in state["rollbacks"]]
        self._raised = [int(step) for step in state.get("raised", ())]
        kept = state.get("quarantined", ())
        self.quarantined = tuple(Quarantined(step=s, cause=c, epoch=e, batches=tuple(b)) for s, c, e, b in kept)
        self.episode.load_state_dict(state["episode"])


def _began(outcome: Outcome) -> str:
    return f"; origin: {outcome.origin}" if outcome.origin else ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings of the ladder, as plain numbers."""

    rolls_back: bool = True
    trust_steps: int = 20
    """Healthy steps before a remembered state may be used."""
    lr_mult: float = 0.7
    lr_mult_again: float = 0.5
    lr_floor_mult: float = 0.01
    """No cut goes below this share of the learning rate asked for."""
    rewarm_steps: int = 50
    unmeant_hold: int = 500
    """Updates before a learning rate that nobody announced is tried, step by step."""
    early_hold: int = 1600
    """Updates before a learning rate is tried again whose first updates multiplied the loss."""
    skips_batches: bool = True
    """False: the loop will give the same batches again, so random numbers are rolled back too."""
    replays: bool = False
    """After a rollback, remembered batches are replayed."""
    coefficients: tuple[str, ...] = ()
    """Those of a policy's loss that may be raised."""


@final
class EarlyStopping:
    """Counts validations in a row that were no better than the best. A value that is not finite never is better.

    >>> early = EarlyStopping(patience=2)
    >>> [early.update(loss) for loss in (1.0, 0.8, 0.9, 0.85)]
    [True, True, False, False]
    >>> early.should_stop
    True
    """

    def __init__(self, *, patience: int | None) -> None:
        self._patience = patience
        self.best = math.inf
        self.since_best = 0

    @property
    def wanted(self) -> bool:
        """There is a patience."""
        return self._patience is not None

    @property
    def should_stop(self) -> bool:
        """So many in a row; never without a patience."""
        return self._patience is not None and self.since_best >= self._patience

    def update(self, loss: float) -> bool:
        """Take in one validation; True when it is the best so far."""
        better = loss < self.best and math.isfinite(loss)
        if better:
            self.best = loss
        self.since_best = 0 if better else self.since_best + 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"best": self.best if math.isfinite(self.best) else None, "since_best": self.since_best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.since_best = int(state["since_best"])


_POLICY_CUT = 0.3  # of a learning rate that took a policy where it earns less
_POLICY_HOLD = 50  # updates, the first time: a grader that failed for a while is no fault of the rate
_POLICY_WAIT = 200  # updates, at the smallest rate, where the cause is another one: until it has passed

# The coefficient that counters each sign of a policy, the first that may be raised.
_COEFFICIENTS: dict[str, tuple[str, ...]] = {
    DetectorName.ENTROPY_COLLAPSE: ("entropy_coef", "kl_coef"),
    DetectorName.KL_BLOW_UP: ("kl_coef",),
    DetectorName.RATIO_EXPLOSION: ("kl_coef",),
    DetectorName.REWARD_HACKING: ("kl_coef",),
    DetectorName.REWARD_COLLAPSE: ("kl_coef", "entropy_coef"),
}


def coefficient_for(diagnosis: Diagnosis, coefficients: Sequence[str]) -> str:
    """The coefficient to raise about a warning; none for notes."""
    wanted = [name for f in diagnosis.findings if f.severity != "info" for name in _COEFFICIENTS.get(f.detector, ())]
    return next((name for name in wanted if name in coefficients), "")


def better_policy(signals: Signals, diagnosis: Diagnosis, budget: Budget, limits: Limits) -> Plan:
    """Back to the policy that earned more, with smaller steps; with the last rollback of a window the run ends."""
    tried = signals.counterfactual
    assert tried is not None
    raised = coefficient_for(diagnosis, limits.coefficients)
    more: tuple[ActionName, ...] = (Action.RAISE_COEFFICIENT,) if raised else ()
    if not limits.rolls_back:
        return Plan(actions=more, reason=diagnosis.cause, raises=raised) if more else Plan()
    if budget.rollbacks_left(signals.step) < 2:
        return Plan(actions=(Action.ROLLBACK, Action.STOP), reason=diagnosis.cause, to=tried.step)
    caused = any(f.where for f in diagnosis.findings if f.detector == DetectorName.REWARD_COLLAPSE)
    again = budget.last_target(signals.step) is not None
    mult = 0.0 if caused else _POLICY_CUT * _POLICY_CUT if again else _POLICY_CUT
    lr = max(mult, limits.lr_floor_mult) * signals.lr
    cut = signals.lr > 0.0 and limits.lr_mult < 1.0
    actions = (Action.ROLLBACK,) + ((Action.CUT_LR,) if cut else ()) + more
    actions += (Action.SKIP_BATCHES,) if limits.skips_batches else ()
    hold = (_POLICY_WAIT if caused else limits.early_hold if again else _POLICY_HOLD) if cut else None
    lr_limit = lr if cut else None
    return Plan(actions=actions, reason=diagnosis.cause, to=tried.step, lr=lr_limit, hold=hold, raises=raised)


def underflows(signals: Signals, diagnosis: Diagnosis) -> bool:
    """All gradients are zero under a loss scaler: such an update only runs down the moments."""
    found = any(f.detector == DetectorName.ZERO_GRADIENT for f in diagnosis.findings)
    return found and signals.scaled and signals.grad_norm == 0.0


def replay_only(signals: Signals, diagnosis: Diagnosis, budget: Budget) -> Plan:
    """Replay all updates since the state that was tried: they end where they did, or better. Never soon after another.

    Whatever went wrong outside of closures and batches for a while does not repeat.
    """
    tried, since = signals.counterfactual, budget.episode.first_sign
    if tried is None or since is None or budget.last_target(signals.step) is not None:
        return Plan()
    actions = (Action.ROLLBACK, Action.REPLAY)
    return Plan(actions=actions, reason=diagnosis.cause, to=tried.step, until=since, outside=True, or_nothing=True)
