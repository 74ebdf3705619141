"""What to try for each cause: not what the guard has done already, nor what the run is set up with."""

from dataclasses import dataclass
from typing import final

from steadystep._utils.text import number
from steadystep.diagnosis.causes import TIPS, Cause, Remedy
from steadystep.records import Action, ActionName, Plan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is known about how a run is set up. The defaults say: nothing."""

    precision: str = ""
    """fp32, bf16 or fp16; empty where it is unknown, as in the log of another tool."""
    clips: bool = False
    warms_up: bool = False
    gives_batch: bool = False
    writes_bundles: bool = False

    @property
    def remedies(self) -> frozenset[Remedy]:
        """What needs no recommending."""
        has = {Remedy.CLIP: self.clips, Remedy.WARM_UP: self.warms_up, Remedy.GIVE_BATCH: self.gives_batch}
        return frozenset(remedy for remedy, there in has.items() if there)


REMEDY_OF: dict[ActionName, Remedy] = {
    Action.SKIP_STEP: Remedy.SKIP,
    Action.LEAVE_OUT: Remedy.SKIP,
    Action.BACK_OFF_SCALE: Remedy.SKIP,
    Action.RESCALE: Remedy.CLIP,
    Action.ROLLBACK: Remedy.ROLL_BACK,
    Action.CUT_LR: Remedy.LOWER_RATE,
    Action.HOLD_LR: Remedy.LOWER_RATE,
}

UNKNOWN_SETUP = Setup()
_WHOLE: tuple[ActionName, ...] = (Action.ROLLBACK, Action.REPLAY)
"""What is left of a plan when every update since the rollback was replayed."""


def advise(
    cause: Cause,
    setup: Setup = UNKNOWN_SETUP,
    plan: Plan | None = None,
    *,
    earlier: frozenset[ActionName] = frozenset(),
) -> str:
    """What was done, in one clause, and what is left to do about `cause`.

    Args:
        cause: the diagnosis.
        setup: what is known about the run.
        plan: what the guard did, as carried out; None for nothing.
        earlier: actions taken at earlier incidents of this cause.
    """
    done = frozenset(plan.actions) if plan is not None else frozenset()
    taken = done | earlier
    there = setup.remedies | {REMEDY_OF[action] for action in taken if action in REMEDY_OF}
    parts = ["" if plan is None else _done(plan)]
    for tip in TIPS[cause]:
        fits = (not tip.after or tip.after & taken) and not tip.unless & taken and tip.remedy not in there
        if fits and not (tip.fp16 and setup.precision in ("fp32", "bf16")):
            parts.append(f"if the run uses fp16: {tip.text}" if tip.fp16 and not setup.precision else tip.text)
    if cause is Cause.DAMAGED_WEIGHTS and Action.ROLLBACK in taken:
        parts.append(_confirm(setup))
    return "; ".join(part for part in parts if part)


def _done(plan: Plan) -> str:
    """What the guard did, as one clause; empty when it only watched."""
    actions = frozenset(plan.actions)
    limit = "" if plan.lr is None else f" and limited the learning rate to {number(plan.lr)}"
    if plan.actions == _WHOLE:
        return "the guard rolled back and replayed every update since, so no progress is lost"
    if Action.ROLLBACK in actions:
        return f"the guard rolled back{limit}"
    if Action.RESTORE_MOMENTS in actions:
        return "the guard restored an earlier state of the optimizer"
    if Action.COPY_REPLICA in actions:
        return f"the guard copied weights and moments from rank {plan.rank}"
    if Action.BACK_OFF_SCALE in actions:
        return "the guard skipped the update and lowered the loss scale"
    if Action.LEAVE_OUT in actions:
        return "the guard left the bad micro-batches out"
    if Action.SKIP_STEP in actions:
        return f"the guard skipped the update{limit}"
    if Action.HOLD_LR in actions:
        return f"the guard holds the learning rate at {number(plan.lr)}"
    if Action.RESCALE in actions:
        return "the guard scaled the gradient down to its usual norm"
    return "the guard restored the kept objects" if Action.RESTORE_KEPT in actions else ""


def _confirm(setup: Setup) -> str:
    """How to find out whether it was the machine."""
    if setup.writes_bundles:
        return "to confirm, run `steadystep replay BUNDLE` on this incident and watch for a second one"
    return "to confirm, watch for a second one; with run_dir= each leaves a bundle for `steadystep replay`"


ADVICE: dict[Cause, str] = {cause: advise(cause) for cause in Cause}
"""By cause, where nothing was done and nothing is known about the run."""
