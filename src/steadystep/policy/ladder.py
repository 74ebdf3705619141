"""DECIDE: from a diagnosis to a plan. Pure, so that every rank decides alike.

The ladder: the smallest response that keeps the weights clean, chosen by the damage and not by how loud it was.

nothing reached      skip-step, leave-out, back-off-scale or rescale; the learning rate stays
moments              restore-moments, then the update as usual
weights, by updates  rollback to a state that does better, replay, cut-lr, skip-batches, rewarm
weights, at once     rollback to the first state, a deep cut: the first updates multiplied the loss
weights, otherwise   rollback to a state before the first sign, replay, skip-batches: no learning rate did that
weights, a little    rollback, replay: kept where the updates go better this time, undone where they do not
a policy             rollback to one that rollouts prove better, cut-lr, raise-coefficient; else the latter alone
weights, one rank's   copy-replica from a rank that holds what most hold, skip-step
weights not finite   rollback to any finite state, or to the newest finite checkpoint; without one, stop
the same again       an older state, a deeper cut
budget spent         stop
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from steadystep.policy.budget import Budget, Limits, better_policy, coefficient_for, replay_only, underflows
from steadystep.policy.trusted_snapshots import TrustedSnapshot, restorable
from steadystep.records import Action, ActionName, Damage, DetectorName, Diagnosis, Finding, Plan, Signals
from steadystep.stats import is_absurd

PROCEED = Plan()
Mode = Literal["observe", "careful", "autopilot"]

_CLEAN = 10.0  # times the usual second moments: poison begins at a hundred
_EARLY_CUT = 0.1  # of a learning rate whose first updates multiplied the loss by a hundred
_FROM_OUTSIDE = (DetectorName.WEIGHT_JUMP, DetectorName.BIT_FLIP, DetectorName.ODD_REPLICA)
_OF_ALL_SAMPLES = (
    *(DetectorName.BUFFER_JUMP, DetectorName.INPUT_SCALE),
    *(DetectorName.RATIO_EXPLOSION, DetectorName.POLICY_MISMATCH),
)
_EXTREME = 10.0  # times the limit: not even the direction of such a gradient is worth having


def decide(
    signals: Signals,
    diagnosis: Diagnosis,
    *,
    budget: Budget,
    mode: Mode = "autopilot",
    states: Sequence[TrustedSnapshot] = (),
    limits: Limits | None = None,
    ceiling: float | None = None,
) -> Plan:
    """What to do about this step.

    Args:
        signals: what was measured.
        diagnosis: what it means.
        budget: what was done before.
        mode: observe does nothing; careful never touches weights, moments or the learning rate.
        states: remembered states, oldest first.
        limits: how deep to cut and how long to trust.
        ceiling: the limit on the learning rate that is in force already.
    """
    if not diagnosis.findings or mode == "observe":
        return PROCEED
    limits, autopilot = limits or Limits(), mode == "autopilot"
    odd = _asked_for(diagnosis, DetectorName.ODD_REPLICA)
    if odd is not None and signals.healthy_rank is not None and autopilot:
        # this step's gradient is in part that of the odd weights
        return Plan(actions=(Action.COPY_REPLICA, Action.SKIP_STEP), reason=diagnosis.cause, rank=signals.healthy_rank)
    if signals.counterfactual is not None and signals.counterfactual.rollouts:
        return better_policy(signals, diagnosis, budget, limits)
    if diagnosis.damage is Damage.WEIGHTS and autopilot and limits.rolls_back:
        if signals.counterfactual is not None and signals.counterfactual.closing:
            return replay_only(signals, diagnosis, budget)
        at_once = _asked_for(diagnosis, DetectorName.EARLY_DIVERGENCE) is not None
        if at_once and _asked_for(diagnosis, DetectorName.WEIGHT_JUMP) is None:
            return _begin_again(signals, diagnosis, budget, states, limits)
        return _roll_back(signals, diagnosis, budget, states, limits, ceiling)
    if has_broken_weights(diagnosis.findings):  # an end, with the weights of a checkpoint in place
        return Plan(actions=(Action.ROLLBACK, Action.STOP), reason=diagnosis.cause)
    actions = [*_refusal(signals, diagnosis)]
    if not actions and underflows(signals, diagnosis) and not budget.skips_spent(signals.step):
        return Plan(actions=(Action.SKIP_STEP,), reason=diagnosis.cause)
    if actions and budget.skips_spent(signals.step):
        # why: where nothing can be run again it may be the weights, and a rollback is the last thing to try; but
        # weights that took updates in between are good ones
        unknown = signals.counterfactual is None and budget.last_target(signals.step) is None
        if unknown and budget.refused_in_a_row > 1 and autopilot and limits.rolls_back and not signals.scaled:
            return _roll_back(signals, diagnosis, budget, states, limits, ceiling)
        actions.append(Action.STOP)
    return _in_place(actions, diagnosis, states, limits, ceiling, autopilot=autopilot)


def _in_place(
    actions: list[ActionName],
    diagnosis: Diagnosis,
    states: Sequence[TrustedSnapshot],
    limits: Limits,
    ceiling: float | None,
    *,
    autopilot: bool,
) -> Plan:
    """Mend the run where it stands: refuse the update by `actions`, rescale, hold the rate, restore moments."""
    norm = to = None
    spike = _asked_for(diagnosis, DetectorName.GRADIENT_SPIKE)
    if spike is not None and not actions:
        actions.append(Action.RESCALE)
        norm = spike.baseline
    lr = _held_lr(diagnosis, ceiling) if autopilot else None
    actions += [] if lr is None else [Action.HOLD_LR]
    kept: tuple[str, ...] = ()
    if diagnosis.damage is Damage.MOMENTS and autopilot:
        to = _before_poison(diagnosis, states)
        actions = actions if to is None else [Action.RESTORE_MOMENTS, *actions]
        kept = _damaged(diagnosis)[1] if states else ()
        actions += [Action.RESTORE_KEPT] if kept else []
    raised = coefficient_for(diagnosis, limits.coefficients) if autopilot else ""
    actions += [Action.RAISE_COEFFICIENT] if raised else []
    if not actions:
        return PROCEED
    hold = None if lr is None else limits.unmeant_hold
    plan = Plan(actions=tuple(actions), reason=diagnosis.cause, norm=norm, lr=lr, to=to, kept=kept, hold=hold)
    return replace(plan, raises=raised) if raised else plan


def _held_lr(diagnosis: Diagnosis, ceiling: float | None) -> float | None:
    """The learning rate from before a jump, or before a creep that nothing limits yet."""
    jump = _asked_for(diagnosis, DetectorName.LEARNING_RATE_JUMP)
    creep = _asked_for(diagnosis, DetectorName.LEARNING_RATE_CREEP) if ceiling is None else None
    found = creep if jump is None else jump
    return None if found is None else found.baseline or None


def _damaged(diagnosis: Diagnosis) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tensors of the optimizer's state and of kept objects that something else than updates has spoiled."""
    found = _asked_for(diagnosis, DetectorName.DAMAGED_STATE)
    where = () if found is None else found.where
    kept = tuple(name for name in where if name.startswith("kept."))
    return tuple(name for name in where if name not in kept), kept


def _before_poison(diagnosis: Diagnosis, states: Sequence[TrustedSnapshot]) -> int | None:
    if _damaged(diagnosis)[0]:  # the states given are those without such damage
        return states[-1].step if states else None
    poisoned = _asked_for(diagnosis, DetectorName.POISONED_MOMENTS)
    if poisoned is None or poisoned.since is None:
        return None
    clean = [s.step for s in states if s.step <= poisoned.since]
    if not clean and poisoned.baseline is not None:  # the poison came after the last probe: some may be from before it
        held = [(s.step, s.second_moment) for s in states if s.step >= 0]
        clean = [step for step, moment in held if moment is not None and moment <= _CLEAN * poisoned.baseline]
    return clean[-1] if clean else None


def _refusal(signals: Signals, diagnosis: Diagnosis) -> tuple[ActionName, ...]:
    """How the update is refused, if it is."""
    refuse = Action.LEAVE_OUT if signals.repeatable and len(signals.losses) > 1 else Action.SKIP_STEP
    if any(f.severity == "critical" for f in diagnosis.findings):
        return (refuse,)
    if not math.isfinite(signals.grad_norm):  # a note: the loss scaler's routine
        return (Action.BACK_OFF_SCALE,)
    if any(_asked_for(diagnosis, name) is not None for name in _OF_ALL_SAMPLES):
        return (Action.SKIP_STEP,)  # why: all losses are finite, so nobody knows which micro-batch it was
    if _asked_for(diagnosis, DetectorName.BIT_FLIP) is not None:
        return (Action.SKIP_STEP,)  # the weights are well again, these gradients are not
    spike = _asked_for(diagnosis, DetectorName.GRADIENT_SPIKE)
    extreme = spike is not None and spike.value > _EXTREME * spike.limit
    return (Action.SKIP_STEP,) if extreme else ()


def _roll_back(
    signals: Signals,
    diagnosis: Diagnosis,
    budget: Budget,
    states: Sequence[TrustedSnapshot],
    limits: Limits,
    ceiling: float | None,
) -> Plan:
    before = signals.step if budget.episode.first_sign is None else budget.episode.first_sign
    broken = has_broken_weights(diagnosis.findings)
    # why: what comes out of nowhere is no fault of the state that was restored last, nor of the learning rate
    retreats = not (broken and budget.episode.sudden)
    if not retreats and states:  # these were found to be finite, so it came later
        before = max(before, states[-1].step + 1)
    good = restorable(states, before=before, step=signals.step, budget=budget, limits=limits, retreats=retreats)
    if signals.counterfactual is not None:  # what was tried is what is restored
        good = [state for state in good if state.step <= signals.counterfactual.step]
    again = budget.last_target(signals.step) if retreats else None
    refusal = _refusal(signals, diagnosis)
    if broken and not any(state.step >= 0 for state in good):  # anything finite that has learned is better than that
        good = [state for state in states if state.step >= 0] or good
    if again is not None and signals.counterfactual is None and not refusal and not signals.odd_replicas and not broken:
        # Nobody could be asked, and a rollback has not helped: it is the data, or cannot be helped.
        return PROCEED
    if budget.rollbacks_spent(signals.step):
        stop = (Action.ROLLBACK, Action.STOP) if good or broken else (Action.SKIP_STEP, Action.STOP)
        return Plan(actions=stop, reason=diagnosis.cause, to=good[-1].step if good else None)
    if not good and broken:
        return _from_checkpoint(signals, diagnosis, budget, limits)
    if not good:  # nowhere to go
        actions = refusal + ((Action.STOP,) if refusal and budget.skips_spent(signals.step) else ())
        return Plan(actions=actions, reason=diagnosis.cause) if actions else PROCEED
    lr = None
    if _by_updates(diagnosis, budget, limits):
        lr = _cut_lr(signals.lr, good[-1].lr, ceiling, limits, is_again=again is not None)
    return _rollback_to(good[-1], diagnosis, limits, lr=lr, until=before, is_again=again is not None)


def _rollback_to(
    state: TrustedSnapshot, diagnosis: Diagnosis, limits: Limits, *, lr: float | None, until: int, is_again: bool
) -> Plan:
    """Restore `state`, replay updates `until` the first sign, cut the learning rate to `lr` where that is given."""
    replays = limits.replays
    actions = (Action.ROLLBACK,) + ((Action.REPLAY,) if replays else ()) + (() if lr is None else (Action.CUT_LR,))
    actions += (Action.SKIP_BATCHES,) if limits.skips_batches else ()
    actions += (Action.REWARM,) if limits.rewarm_steps and lr is not None else ()
    return Plan(
        actions=actions,
        reason=diagnosis.cause,
        to=state.step,
        lr=lr,
        until=until if replays else None,
        outside=replays and any(_asked_for(diagnosis, name) for name in _FROM_OUTSIDE),
        only_whole=replays and is_again,
    )


def _cut_lr(lr: float, then: float, ceiling: float | None, limits: Limits, *, is_again: bool) -> float | None:
    """A share of the least learning rate that was in use, now or `then`; None where nothing is to be cut."""
    cut = limits.lr_mult_again if is_again else limits.lr_mult
    if not cut < 1.0:
        return None
    # why not the ceiling of an older trouble: cuts of cuts would never be given back
    used = (lr, then) if is_again or ceiling is None else (lr,)
    lrs = [each for each in (*used, ceiling if is_again else None) if each is not None and each > 0.0]
    return max(cut * min(lrs), limits.lr_floor_mult * lr) if lrs else 0.0


def _from_checkpoint(signals: Signals, diagnosis: Diagnosis, budget: Budget, limits: Limits) -> Plan:
    """The learning rate is cut where trouble was seen coming, or comes back: nothing is replayed that could tell."""
    again = budget.last_target(signals.step) is not None
    cut = 1.0 if budget.episode.sudden else limits.lr_mult_again if again else limits.lr_mult
    if not cut < 1.0 or not signals.lr > 0.0:
        return Plan(actions=(Action.ROLLBACK,), reason=diagnosis.cause)
    actions = (Action.ROLLBACK, Action.CUT_LR, *((Action.REWARM,) if limits.rewarm_steps else ()))
    return Plan(actions=actions, reason=diagnosis.cause, lr=cut * signals.lr)


def has_broken_weights(findings: Sequence[Finding]) -> bool:
    """A weight is NaN, infinite or absurd: whatever the loss says, no update can be made with it."""
    return any(f.detector == DetectorName.WEIGHT_JUMP and f.severity == "act" and is_absurd(f.value) for f in findings)


def _begin_again(
    signals: Signals, diagnosis: Diagnosis, budget: Budget, states: Sequence[TrustedSnapshot], limits: Limits
) -> Plan:
    """Back to before the first sign of a loss that multiplied at once, with a tenth of the learning rate.

    Nothing is replayed: it was one of those updates, and nothing was learned from them. The last rollback of a window
    is kept for later: a run that cannot be helped is told so, and goes on.
    """
    before = signals.step if budget.episode.first_sign is None else budget.episode.first_sign
    good = restorable(states, before=before, step=signals.step, budget=budget, limits=limits)
    good = [state for state in good if signals.counterfactual is None or state.step <= signals.counterfactual.step]
    if not good or not signals.lr > 0.0 or limits.lr_mult >= 1.0 or budget.rollbacks_left(signals.step) < 2:
        refusal = _refusal(signals, diagnosis)
        return Plan(actions=refusal, reason=diagnosis.cause) if refusal else PROCEED
    again = budget.last_target(signals.step) is not None
    actions = (Action.ROLLBACK, Action.CUT_LR) + ((Action.SKIP_BATCHES,) if limits.skips_batches else ())
    actions += (Action.REWARM,) if limits.rewarm_steps else ()
    return Plan(
        actions=actions,
        reason=diagnosis.cause,
        to=good[-1].step,
        lr=max(_EARLY_CUT * _EARLY_CUT if again else _EARLY_CUT, limits.lr_floor_mult) * signals.lr,
        hold=limits.early_hold,
    )


def _by_updates(diagnosis: Diagnosis, budget: Budget, limits: Limits) -> bool:
    """Whether updates can have caused the damage: not where weights jumped between two of them, or NaN came at once.

    Where updates are replayed it shows whether the jump comes back, and with nothing lost nothing is cut.
    """
    if any(f.detector in (DetectorName.WEIGHT_JUMP, DetectorName.ODD_REPLICA) for f in diagnosis.findings):
        return limits.replays
    lasting = any(f.detector in (DetectorName.NOT_HEALING, DetectorName.SLOW_DIVERGENCE) for f in diagnosis.findings)
    return lasting or not budget.episode.sudden


def _asked_for(diagnosis: Diagnosis, detector: str) -> Finding | None:
    return next((f for f in diagnosis.findings if f.detector == detector and f.severity == "act"), None)
