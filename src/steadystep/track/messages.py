"""One line about one step, for logs and terminals."""

from steadystep.records import Outcome
from steadystep.words import state_of

_REFUSED = {
    "skip-step": "update skipped",
    "back-off-scale": "update skipped, loss scale halved",
    "leave-out": "no usable micro-batch, update skipped",
}


def describe(outcome: Outcome) -> str:
    """What was seen, what was done, why."""
    diagnosis = outcome.diagnosis
    began = f"; origin: {outcome.origin}" if outcome.origin else ""
    return (
        f"step {outcome.step}: {diagnosis.evidence or outcome.plan.reason}: {did(outcome)} [{diagnosis.cause}]{began}"
    )


def did(outcome: Outcome) -> str:
    """What was done, as a clause."""
    plan = outcome.plan
    if outcome.restored is not None:
        cut = f", learning rate held at {plan.lr:.3g} or below" if plan.lr is not None else ""
        how = "bit for bit" if outcome.exact else "not verified bit for bit"
        again = f", made {outcome.caught_up} updates since again ({how})" if outcome.caught_up else ""
        return f"went back to {state_of(plan.to)}{again}{cut}"
    done = []
    if "restore-moments" in plan.steps:
        done.append(f"optimizer restored to {state_of(plan.to)}")
    if plan.rank is not None:
        done.append(f"weights and moments copied from rank {plan.rank}")
    if plan.kept:
        done.append("kept objects restored")
    if plan.lr is not None:
        done.append(f"learning rate held at {plan.lr:.3g} or below")
    if outcome.left_out:
        done.append(f"updated without micro-batch {', '.join(str(i) for i in outcome.left_out)} of its group")
    elif not outcome.stepped:
        done.append(next((_REFUSED[step] for step in plan.steps if step in _REFUSED), "update skipped"))
    elif plan.norm is not None:
        done.append(f"gradient scaled down to {plan.norm:.3g}")
    elif any(f.severity == "critical" for f in outcome.findings):
        done.append("updated all the same (observe mode)")
    return ", ".join(done) or "updated"
