"""What to try for each cause: not what the guard has done already, nor what the run is set up with."""

from steadystep._utils.text import number
from steadystep.diagnosis.causes import POLICY_TIPS, REMEDY_OF, Cause, Fault, Remedy, Tip
from steadystep.diagnosis.facts import UNKNOWN_SETUP, Setup
from steadystep.diagnosis.fault_tips import FAULT_TIPS
from steadystep.records import Action, ActionName, Plan

_BACK = frozenset[ActionName]((Action.ROLLBACK,))
_STOP = frozenset[ActionName]((Action.STOP,))
_CUT = frozenset[ActionName]((Action.CUT_LR,))
_FIND_LR = Tip("steadystep.find_lr shows the usable range")
_LOWER = Tip("lower the learning rate", Remedy.LOWER_RATE)
_KEEP_LOW = Tip("set that learning rate in your own settings: the limit is lifted again", after=_CUT)
_BF16 = Tip("use bf16, or keep the modules with the largest activations in fp32 (training.fp32_modules)", fp16=True)

# In the order in which they are given. The first part of a tip says why, where the cause does not.
TIPS: dict[Cause, tuple[Tip, ...]] = {
    Cause.HEALTHY: (),
    Cause.NON_FINITE_INPUT: (
        Tip("clean the data: this batch contains NaN or infinity before the model sees it"),
        Tip("skip such batches (mode: careful does)", Remedy.SKIP),
    ),
    Cause.FORWARD_OVERFLOW: (
        Tip(
            "a value exceeded 65504, the largest fp16 number, in the forward pass, which no loss scale fixes: use "
            "bf16, or keep the overflowing module in fp32 (training.fp32_modules)",
            fp16=True,
        ),
        Tip("check this batch and the loss for log(0), 0/0 or a mean over zero tokens"),
    ),
    Cause.NON_FINITE_LOSS: (
        Tip("check this batch and the loss for log(0), 0/0 or a mean over zero tokens"),
        Tip("check for weights that have grown too large", unless=_BACK),
    ),
    Cause.NON_FINITE_GRADIENT: (
        Tip(
            "the loss is finite and its gradient is not: check for sqrt or a norm at exactly 0, torch.where over an "
            "invalid branch, and gradients too large to be squared"
        ),
    ),
    Cause.SCALE_OVERFLOW: (Tip("routine in fp16, nothing to change", fp16=True),),
    Cause.NON_FINITE_BUFFER: (Tip("check the scale of this batch: a running statistic overflowed"),),
    Cause.LOSS_SCALE_COLLAPSE: (Tip("fp16 overflows repeatedly", fp16=True), _BF16, _LOWER, _KEEP_LOW),
    Cause.GRADIENT_UNDERFLOW: (
        Tip("gradients round to zero in fp16: use bf16, or a loss scaler with a higher scale", fp16=True),
        Tip("check the reduction of the loss: a mean over very many elements makes gradients small"),
    ),
    Cause.SCHEDULE_ERROR: (
        Tip(
            "fix the schedule: print the learning rate around this step; a scheduler that is restarted or stepped "
            "twice per update is the usual cause"
        ),
    ),
    Cause.MISSING_ZERO_GRAD: (
        Tip("gradients accumulate across updates: call optimizer.zero_grad() after each, as guard.step() does"),
    ),
    Cause.CLOSURE_NOT_REPEATABLE: (
        Tip("pass the data as step(closure, batch=...), so that the closure can be run again", Remedy.GIVE_BATCH),
        Tip("keep iterators, counters and other side effects out of the closure"),
    ),
    Cause.EXCEPTION_IN_STEP: (
        Tip(
            "check the batch of this step and the line that the error names; recovery.max_exceptions: 0 raises it with "
            "its traceback"
        ),
    ),
    Cause.CLIPPING_TOO_TIGHT: (
        Tip("most updates are clipped, so the limit sets their size: raise max_grad_norm above the usual norm"),
        Tip("lower the learning rate if that is unstable", Remedy.LOWER_RATE),
        Tip("check the scale of targets and loss: it is a common reason for gradients this large"),
    ),
    Cause.LEARNING_RATE_TOO_HIGH: (
        Tip("divide the learning rate by 3 to 10", Remedy.LOWER_RATE),
        _KEEP_LOW,
        Tip("warm it up over more steps", Remedy.WARM_UP),
        _FIND_LR,
    ),
    Cause.LEARNING_RATE_TOO_LOW: (Tip("multiply the learning rate by 10 and compare"), _FIND_LR),
    Cause.BATCH_SIZE_UNFIT: (
        Tip("noise between batches hides the progress: use larger batches or gradient_accumulation_steps"),
        _LOWER,
    ),
    Cause.OSCILLATION: (_LOWER, _KEEP_LOW, Tip("lower the momentum, or use larger batches")),
    Cause.BAD_BATCH: (
        Tip("check the data of this step for wrong labels, a wrong scale or a corrupt file"),
        Tip("a single such batch needs no other change"),
    ),
    Cause.DATA_SHIFT: (
        Tip(
            "earlier weights do no better on these batches, so the data has changed: check what the loader yields from "
            "here on, and shuffle across the whole dataset if it has reached a new part of it"
        ),
    ),
    Cause.UNSCALED_DATA: (
        Tip(
            "normalize each input feature to mean 0 and standard deviation 1 (images: divide by 255), and the targets "
            "of a regression too"
        ),
    ),
    Cause.REPEATED_BATCH: (
        Tip(
            "the loader yields the same batch repeatedly: check for next(iter(loader)) in the loop, a sampler that is "
            "not advanced, or a worker stuck on one file"
        ),
    ),
    Cause.EXPLODING_GRADIENT: (
        Tip("a single spike needs no change", after=frozenset((Action.RESCALE, Action.SKIP_STEP))),
        Tip("clip the gradient (training.max_grad_norm: 1.0)", Remedy.CLIP),
        Tip("if spikes recur, add normalization layers"),
        Tip("warm the learning rate up", Remedy.WARM_UP),
        _LOWER,
    ),
    Cause.VANISHING_GRADIENT: (
        Tip(
            "the first layers hardly learn: use ReLU or GELU instead of sigmoid or tanh, residual connections, "
            "normalization layers, and an initialization made for the activation"
        ),
    ),
    Cause.ZERO_GRADIENT: (
        Tip(
            "parts of the model receive no gradient: check for an output that cannot reach the targets (a final ReLU), "
            "for detach() or argmax, and for frozen or unused layers"
        ),
    ),
    Cause.DEAD_UNITS: (
        Tip("units that output zero for every input receive no gradient: use LeakyReLU or GELU, and start biases at 0"),
        _LOWER,
    ),
    Cause.SATURATION: (
        Tip(
            "sigmoid or tanh units are saturated: scale the inputs, start with smaller weights, or put normalization "
            "layers before them"
        ),
    ),
    Cause.EMBEDDING_GROWTH: (
        Tip("embedding rows keep growing: bound them with steadystep.layers.BoundedEmbedding(max_norm=...)"),
        Tip("slow them down with a lower learning rate for the embedding, shrink_gradient or weight decay"),
    ),
    Cause.ATTENTION_LOGIT_GROWTH: (
        Tip(
            "attention collapses to single positions: use steadystep.layers.StableAttention (qk_norm or logit_cap), or "
            "call qk_clip_ after each update, which needs no other layer"
        ),
        Tip("a smaller beta2 (0.95) slows the growth"),
        _LOWER,
        Tip("for the logits of the output use z_loss instead"),
    ),
    Cause.POOR_INITIALISATION: (
        Tip(
            "the initial weights are all equal or far too large: use steadystep.init.initialise_ with a recipe for the "
            "model's activations"
        ),
    ),
    Cause.POISONED_MOMENTS: (
        Tip(
            "one huge gradient entered the optimizer's moments and will hold back updates for hundreds of steps",
            unless=frozenset((Action.RESTORE_MOMENTS, Action.ROLLBACK)),
        ),
        Tip("clip the gradient (training.max_grad_norm: 1.0)", Remedy.CLIP),
        Tip("use a smaller beta2 (0.95)"),
    ),
    Cause.LOST_MOMENTS: (
        Tip(
            "the optimizer's state was cleared or replaced: load it together with the weights, and keep one optimizer "
            "for the whole run; if it was intended, repeat the warmup"
        ),
    ),
    Cause.DAMAGED_WEIGHTS: (
        Tip("roll back to a checkpoint from before the first sign", Remedy.ROLL_BACK),
        Tip("resume with a lower learning rate", Remedy.LOWER_RATE, unless=_BACK),
        _KEEP_LOW,
        Tip(
            "suspect the machine or the code, not the hyperparameters: failing memory, a faulty link, a kernel race, "
            "or code that writes to param.data (wrap an intended edit in guard.editing())",
            after=_BACK,
            unless=_CUT,
        ),
        Tip("if it recurs without such a limit, suspect failing memory or code that writes to param.data", after=_CUT),
    ),
    Cause.ODD_REPLICA: (
        Tip(
            "all ranks took the same updates and their weights differ: suspect the memory or the accelerator of that "
            "rank, and code that changes weights on some ranks only"
        ),
    ),
    Cause.MISCOMPUTED_STEP: (
        Tip(
            "a single one lost nothing: note rank, host and step, and watch for a second one on that machine",
            unless=_STOP,
        ),
        Tip(
            "take that machine out of the job and give its operators rank, host, step and tensors as named here, to "
            "test its processor, accelerator and memory; if the closure is no longer repeatable, "
            "set monitoring.recompute_every: 0 instead",
            after=_STOP,
        ),
    ),
    **POLICY_TIPS,
    Cause.METRIC_OUT_OF_BOUNDS: (Tip("check how this metric is computed: division by 0, an empty mask, log(0)"),),
    Cause.NO_LEARNING: (
        Tip(
            "check that the labels match the inputs, that the loss fits the output, and that the optimizer holds the "
            "model's parameters; try to overfit a single batch first"
        ),
    ),
    Cause.SUSPICIOUS_PERFECTION: (
        Tip("check for the target among the inputs, a loss over zero elements, and a dataset that is too easy"),
    ),
    Cause.UNKNOWN: (Tip("no rule explains this: see the findings in the evidence"),),
}
"""What to change for each cause."""


_WHOLE: tuple[ActionName, ...] = (Action.ROLLBACK, Action.REPLAY)
"""What is left of a plan when every update since the rollback was replayed."""


def advise(
    cause: Cause,
    setup: Setup = UNKNOWN_SETUP,
    plan: Plan | None = None,
    *,
    earlier: frozenset[ActionName] = frozenset(),
    fault: str = "",
) -> str:
    """What was done, in one clause, and what is left to do about `cause`.

    Args:
        cause: the diagnosis.
        setup: what is known about the run.
        plan: what the guard did, as carried out; None for nothing.
        earlier: actions taken at earlier incidents of this cause.
        fault: value of the `Fault` behind it, whose advice is more particular.
    """
    done = frozenset(plan.actions) if plan is not None else frozenset()
    taken = done | earlier
    there = remedies_of(setup) | {REMEDY_OF[action] for action in taken if action in REMEDY_OF}
    parts = ["" if plan is None else _done(plan)]
    for tip in FAULT_TIPS[Fault(fault)] if fault else TIPS[cause]:
        fits = (not tip.after or tip.after & taken) and not tip.unless & taken and tip.remedy not in there
        if fits and not (tip.fp16 and setup.precision in ("fp32", "bf16")):
            parts.append(f"if the run uses fp16: {tip.text}" if tip.fp16 and not setup.precision else tip.text)
    if cause is Cause.DAMAGED_WEIGHTS and Action.ROLLBACK in taken:
        parts.append(_confirm(setup))
    return "; ".join(part for part in parts if part)


def remedies_of(setup: Setup) -> frozenset[Remedy]:
    """Return what the settings of the run have already."""
    has = {Remedy.CLIP: setup.clips, Remedy.WARM_UP: setup.warms_up, Remedy.GIVE_BATCH: setup.gives_batch}
    return frozenset(remedy for remedy, there in has.items() if there)


def _done(plan: Plan) -> str:
    """What the guard did, as one clause; empty when it only watched."""
    actions = frozenset(plan.actions)
    limit = "" if plan.lr is None else f" and limited the learning rate to {number(plan.lr)}"
    if plan.actions == _WHOLE:
        return "the guard rolled back and replayed every update since, so no progress is lost"
    if Action.ROLLBACK in actions:
        return f"the guard rolled back{limit}"
    if Action.RAISE_COEFFICIENT in actions and not plan.lr:
        return f"the guard raised {plan.raises}"
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
