"""The ladder: the smallest response that keeps the weights clean."""

from steadystep.policy.budget import Budget
from steadystep.records import Diagnosis, Plan, Signals

PROCEED = Plan()


def decide(signals: Signals, diagnosis: Diagnosis, *, budget: Budget, observing: bool) -> Plan:
    """What to do about this step.

    skip-step        no update; the batch leaves no trace
    back-off-scale   no update; the loss scaler halves its scale
    leave-out        compute the group again without its bad micro-batches, and update with the rest if any is left
    stop             if still no update: raise, because refusing has not helped so far
    """
    if not diagnosis.findings or observing:
        return PROCEED
    if all(finding.severity == "info" for finding in diagnosis.findings):
        first = "back-off-scale"
    elif signals.repeatable and len(signals.losses) > 1:
        first = "leave-out"
    else:
        first = "skip-step"
    return Plan(steps=(first, "stop") if budget.spent else (first,), reason=diagnosis.cause)
