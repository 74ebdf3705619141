"""One line about one step, for logs and terminals."""

from steadystep.records import Outcome

_DID = {
    "skip-step": "update skipped",
    "back-off-scale": "update skipped, loss scale halved",
    "leave-out": "no usable micro-batch, update skipped",
}


def describe(outcome: Outcome) -> str:
    """What was seen, what was done, why."""
    diagnosis = outcome.diagnosis
    if outcome.left_out:
        left = ", ".join(str(i) for i in outcome.left_out)
        did = f"updated without micro-batch {left} of its group"
    elif outcome.stepped:
        did = "updated all the same (observe mode)"
    else:
        did = next((_DID[step] for step in outcome.plan.steps if step in _DID), "update skipped")
    return f"step {outcome.step}: {diagnosis.evidence or outcome.plan.reason}: {did} [{diagnosis.cause}]"
