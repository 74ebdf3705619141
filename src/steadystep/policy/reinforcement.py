"""DECIDE, where a policy is at fault: which coefficient to raise, and the rollback that rollouts have proved."""

from collections.abc import Sequence

from steadystep.policy.budget import Budget, Limits
from steadystep.records import Action, ActionName, DetectorName, Diagnosis, Plan, Signals

_POLICY_CUT = 0.3  # of a learning rate that took a policy where it earns less

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
    """Back to the policy that earned more, with smaller steps; the last rollback of a window is kept for later."""
    tried = signals.counterfactual
    assert tried is not None
    raised = coefficient_for(diagnosis, limits.coefficients)
    more: tuple[ActionName, ...] = (Action.RAISE_COEFFICIENT,) if raised else ()
    if not limits.rolls_back or budget.rollbacks_left(signals.step) < 2:
        return Plan(actions=more, reason=diagnosis.cause, raises=raised) if more else Plan()
    again = budget.last_target(signals.step) is not None
    lr = max(_POLICY_CUT * _POLICY_CUT if again else _POLICY_CUT, limits.lr_floor_mult) * signals.lr
    cut = signals.lr > 0.0 and limits.lr_mult < 1.0
    actions = (Action.ROLLBACK,) + ((Action.CUT_LR,) if cut else ()) + more
    actions += (Action.SKIP_BATCHES,) if limits.skips_batches else ()
    hold = limits.early_hold if cut else None
    lr_limit = lr if cut else None
    return Plan(actions=actions, reason=diagnosis.cause, to=tried.step, lr=lr_limit, hold=hold, raises=raised)
