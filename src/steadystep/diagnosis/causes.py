"""The closed list of causes, and what one can do about them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from steadystep.records import Action, ActionName


class Cause(StrEnum):
    """Why a step, or a run, went wrong."""

    HEALTHY = "healthy"
    """Nothing is wrong."""
    # NaN and infinity
    NON_FINITE_INPUT = "non-finite-input"
    """The batch holds NaN or infinity."""
    FORWARD_OVERFLOW = "forward-overflow"
    """The forward pass overflowed in fp16."""
    NON_FINITE_LOSS = "non-finite-loss"
    """The loss is NaN or infinite."""
    NON_FINITE_GRADIENT = "non-finite-gradient"
    """A gradient is NaN or infinite while the loss is finite."""
    SCALE_OVERFLOW = "scale-overflow"
    """The fp16 loss scale was too high: routine."""
    NON_FINITE_BUFFER = "non-finite-buffer"
    """A buffer, such as a running statistic, became non-finite."""
    LOSS_SCALE_COLLAPSE = "loss-scale-collapse"
    """Gradients overflow in fp16 again and again."""
    GRADIENT_UNDERFLOW = "gradient-underflow"
    """Gradients round to zero in fp16."""
    # the loop
    SCHEDULE_ERROR = "schedule-error"
    """The schedule gave an implausible learning rate."""
    MISSING_ZERO_GRAD = "missing-zero-grad"
    """Gradients add up from step to step."""
    CLOSURE_NOT_REPEATABLE = "closure-not-repeatable"
    """Gradients were lost and cannot be computed again."""
    EXCEPTION_IN_STEP = "exception-in-step"
    """The closure raised."""
    CLIPPING_TOO_TIGHT = "clipping-too-tight"
    """Clipping, not the gradient, sets the size of most updates."""
    # the size of the steps
    LEARNING_RATE_TOO_HIGH = "learning-rate-too-high"
    """The learning rate is too high."""
    LEARNING_RATE_TOO_LOW = "learning-rate-too-low"
    """The learning rate is too low."""
    BATCH_SIZE_UNFIT = "batch-size-unfit"
    """Noise between batches hides the progress."""
    OSCILLATION = "oscillation"
    """The loss oscillates around one level."""
    # the data
    BAD_BATCH = "bad-batch"
    """One batch has bad data."""
    DATA_SHIFT = "data-shift"
    """The data has changed; the weights still do well on older data."""
    UNSCALED_DATA = "unscaled-data"
    """Inputs or targets are not normalized."""
    REPEATED_BATCH = "repeated-batch"
    """The loader gives the same batch again and again."""
    # the model
    EXPLODING_GRADIENT = "exploding-gradient"
    """Gradients grow far beyond their baseline."""
    VANISHING_GRADIENT = "vanishing-gradient"
    """The first layers get hardly any gradient."""
    ZERO_GRADIENT = "zero-gradient"
    """Parts of the model get no gradient at all."""
    DEAD_UNITS = "dead-units"
    """Units output zero for every input."""
    SATURATION = "saturation"
    """Sigmoids or tanhs are in their flat part."""
    EMBEDDING_GROWTH = "embedding-growth"
    """Embedding rows keep growing."""
    ATTENTION_LOGIT_GROWTH = "attention-logit-growth"
    """Attention logits keep growing."""
    POOR_INITIALISATION = "poor-initialisation"
    """The initial weights are all equal or far too large."""
    POISONED_MOMENTS = "poisoned-moments"
    """One huge gradient went into the optimizer's moments."""
    LOST_MOMENTS = "lost-moments"
    """The optimizer's moments were cleared or not loaded."""
    DAMAGED_WEIGHTS = "damaged-weights"
    """The weights themselves are damaged."""
    ODD_REPLICA = "odd-replica"
    """Weights differ between ranks."""
    MISCOMPUTED_STEP = "miscomputed-step"
    """A step gave another result when it was computed again: the hardware."""
    # the policy
    POLICY_DRIFT = "policy-drift"
    """The policy drifts away from its reference."""
    ENTROPY_COLLAPSE = "entropy-collapse"
    """The policy has stopped exploring."""
    FLAT_REWARD = "flat-reward"
    """The reward is always the same."""
    RATIO_EXPLOSION = "ratio-explosion"
    """Importance ratios are far beyond their baseline: updates move the policy too far from its samples."""
    POLICY_MISMATCH = "policy-mismatch"
    """Sampler and learner give the same tokens different probabilities."""
    REWARD_HACKING = "reward-hacking"
    """The reward rises while what it stands for falls."""
    DEAD_GROUPS = "dead-groups"
    """The rewards inside most groups are equal, so they teach nothing."""
    BAD_ADVANTAGES = "bad-advantages"
    """Advantages go against the rewards they are made of, or a few outgrow all others."""
    VALUE_DIVERGENCE = "value-divergence"
    """The value function runs away from the returns."""
    POLICY_COLLAPSE = "policy-collapse"
    """The policy has lost much of the reward that it had gained."""
    METRIC_OUT_OF_BOUNDS = "metric-out-of-bounds"
    """A metric is non-finite or outside its bounds."""
    # the result
    NO_LEARNING = "no-learning"
    """The loss is where it began."""
    SUSPICIOUS_PERFECTION = "suspicious-perfection"
    """The loss is implausibly close to zero."""
    UNKNOWN = "unknown"
    """No rule explains the findings."""


class Fault(StrEnum):
    """The particular mistake behind a cause, where it could be told: `Diagnosis.fault`."""

    FROZEN_PARAMETERS = "frozen-parameters"
    """Parameters that nothing changes: `requires_grad` is off, their rate is 0, or they are no part of the model."""
    WRONG_OPTIMIZER_PARAMS = "wrong-optimizer-params"
    """Parameters that are trained by no optimizer."""
    CONSTANT_TARGETS = "constant-targets"
    """Every target is the same."""
    ALL_IGNORED_TARGETS = "all-ignored-targets"
    """Every target is the label that the loss ignores."""
    LABELS_SHUFFLED = "labels-shuffled"
    """Targets do not belong to their inputs."""
    UNSCALED_TARGETS = "unscaled-targets"
    """Targets far from unit scale."""
    TARGET_LEAK = "target-leak"
    """The model is given what it should predict."""
    CONSTANT_INPUTS = "constant-inputs"
    """Every input is the same."""
    UNSHUFFLED_DATA = "unshuffled-data"
    """Batches hold one kind of sample each."""
    WRONG_LOSS = "wrong-loss"
    """The loss does not fit the outputs: an activation twice, a wrong sign, shapes that broadcast."""
    SOFTMAX_AXIS = "softmax-axis"
    """A softmax over the wrong dimension, or over a single unit."""
    OUTPUT_INDEPENDENT_OF_INPUT = "output-independent-of-input"
    """The output is the same whatever the input."""
    BATCH_DEPENDENCE = "batch-dependence"
    """The output of a sample depends on its neighbors in the batch."""
    REGULARISATION_TOO_STRONG = "regularisation-too-strong"
    """Weight decay or dropout keeps the model from learning."""
    PRECISION = "precision"
    """Weights, gradients or moments lose too many digits."""
    EVAL_MODE = "eval-mode"
    """The model trains in evaluation mode."""


class Remedy(StrEnum):
    """What a tip can recommend, and a run may have already: by its settings, or by what the guard has done."""

    SKIP = "skip the batch"
    ROLL_BACK = "roll back"
    LOWER_RATE = "lower the learning rate"
    WARM_UP = "warm the learning rate up"
    CLIP = "clip gradients"
    GIVE_BATCH = "pass batch="


@final
@dataclass(frozen=True, slots=True)
class Tip:
    """One piece of advice, and when it applies."""

    text: str
    remedy: Remedy | None = None
    """Not given where this was done or is set."""
    fp16: bool = False
    """Only about fp16: conditional where the precision is unknown, and not given in fp32 and bf16."""
    after: frozenset[ActionName] = frozenset()
    """Only after one of these actions."""
    unless: frozenset[ActionName] = frozenset()
    """Not after any of these actions."""


REMEDY_OF: dict[ActionName, Remedy] = {
    Action.SKIP_STEP: Remedy.SKIP,
    Action.LEAVE_OUT: Remedy.SKIP,
    Action.BACK_OFF_SCALE: Remedy.SKIP,
    Action.RESCALE: Remedy.CLIP,
    Action.ROLLBACK: Remedy.ROLL_BACK,
    Action.CUT_LR: Remedy.LOWER_RATE,
    Action.HOLD_LR: Remedy.LOWER_RATE,
}


_BLOW_UPS: set[str] = {
    *(Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.NON_FINITE_BUFFER, Cause.FORWARD_OVERFLOW),
    *(Cause.EXPLODING_GRADIENT, Cause.BAD_BATCH, Cause.DAMAGED_WEIGHTS, Cause.POISONED_MOMENTS, Cause.OSCILLATION),
    *(Cause.DEAD_UNITS, Cause.SATURATION, Cause.EMBEDDING_GROWTH, Cause.ATTENTION_LOGIT_GROWTH),
    Cause.CLIPPING_TOO_TIGHT,
}
_LIFELESS: set[str] = {Fault.OUTPUT_INDEPENDENT_OF_INPUT, Fault.LABELS_SHUFFLED, Cause.NO_LEARNING}
_OVERFLOWS: set[str] = {Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.FORWARD_OVERFLOW}
_STANDSTILLS: set[str] = {Cause.ZERO_GRADIENT, Cause.NO_LEARNING, Cause.LEARNING_RATE_TOO_LOW, *_LIFELESS}

# What else a cause accounts for when it is there: those are consequences, and come after it.
CONSEQUENCES: dict[str, set[str]] = {
    Cause.MISSING_ZERO_GRAD: {*_BLOW_UPS, *_STANDSTILLS, Cause.LEARNING_RATE_TOO_HIGH},
    Cause.UNSCALED_DATA: {*_BLOW_UPS, *_STANDSTILLS, Cause.LEARNING_RATE_TOO_HIGH, Cause.POOR_INITIALISATION},
    Cause.POOR_INITIALISATION: {*_BLOW_UPS, *_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.SCHEDULE_ERROR: {*_BLOW_UPS, *_STANDSTILLS, Cause.LEARNING_RATE_TOO_HIGH},
    Cause.LEARNING_RATE_TOO_HIGH: {*_BLOW_UPS, *_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.EXPLODING_GRADIENT: {Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.DAMAGED_WEIGHTS},
    Cause.DATA_SHIFT: {Cause.LEARNING_RATE_TOO_HIGH},
    Cause.CLIPPING_TOO_TIGHT: {Cause.LEARNING_RATE_TOO_LOW},
    Cause.DAMAGED_WEIGHTS: {Cause.NON_FINITE_LOSS, Cause.NON_FINITE_GRADIENT, Cause.NON_FINITE_BUFFER},
    Cause.GRADIENT_UNDERFLOW: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.VANISHING_GRADIENT: {*_STANDSTILLS},
    Cause.SATURATION: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.EMBEDDING_GROWTH: {*_OVERFLOWS, Cause.ATTENTION_LOGIT_GROWTH},
    Cause.ATTENTION_LOGIT_GROWTH: {*_OVERFLOWS},
    Cause.DEAD_UNITS: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.SUSPICIOUS_PERFECTION: {*_STANDSTILLS, Cause.VANISHING_GRADIENT},
    Cause.BATCH_SIZE_UNFIT: {Cause.SUSPICIOUS_PERFECTION, Cause.ZERO_GRADIENT},
}

EXPLAINED: dict[str, set[str]] = {
    Cause.POOR_INITIALISATION: _LIFELESS,
    Cause.DEAD_UNITS: _LIFELESS,
    Cause.ZERO_GRADIENT: _LIFELESS,
    Cause.SATURATION: _LIFELESS,
    Cause.UNSCALED_DATA: _LIFELESS,
    Cause.VANISHING_GRADIENT: _LIFELESS,
    Fault.CONSTANT_INPUTS: {*_LIFELESS, Cause.UNSCALED_DATA},
    Fault.SOFTMAX_AXIS: {*_LIFELESS, Fault.WRONG_LOSS},
    Fault.CONSTANT_TARGETS: _LIFELESS,
}
"""What follows by necessity, even where it was seen as it is."""

_LOWER = Tip("lower the learning rate", Remedy.LOWER_RATE)
_BACK = Tip("roll back to an earlier checkpoint", Remedy.ROLL_BACK)

POLICY_TIPS: dict[Cause, tuple[Tip, ...]] = {
    Cause.POLICY_DRIFT: (
        Tip("raise the KL coefficient (beta, kl_loss_coef), or take fewer updates per batch of rollouts"),
        _LOWER,
        Tip("the samples of these steps show whether the reward is being gamed"),
    ),
    Cause.ENTROPY_COLLAPSE: (
        Tip(
            "raise the upper clip range only (clip-higher: epsilon_high 0.28), add an entropy bonus, or raise the "
            "sampling temperature or the KL coefficient"
        ),
        _LOWER,
        _BACK,
    ),
    Cause.RATIO_EXPLOSION: (
        Tip("take fewer epochs or larger minibatches per batch of rollouts, or stop them early (target_kl)"),
        _LOWER,
        Tip("check that old log-probabilities are those of the sampled tokens, at the same temperature and mask"),
    ),
    Cause.POLICY_MISMATCH: (
        Tip(
            "correct with truncated importance weights (TRL vllm_importance_sampling_correction, verl "
            "rollout_correction, NeMo-RL use_importance_sampling_correction)"
        ),
        Tip("sync the sampler's weights before each batch, and compare its temperature, top-p and tokenization"),
        Tip("run sampler and learner in the same precision: with more digits than bf16 has, the gap is smaller"),
    ),
    Cause.REWARD_HACKING: (
        Tip("read samples of these steps: the reward pays for something else than it should; fix or mix the reward"),
        Tip("raise the KL coefficient, and penalize length where responses grow (overlong penalty)"),
        Tip("roll back to the checkpoint with the best held-out reward", Remedy.ROLL_BACK),
    ),
    Cause.DEAD_GROUPS: (
        Tip(
            "groups with equal rewards give no gradient: filter them and sample again (dynamic sampling), use larger "
            "groups, or prompts whose success rate is neither 0 nor 1"
        ),
    ),
    Cause.BAD_ADVANTAGES: (
        Tip("check the sign of advantages and of the policy's loss, and whether a few outliers decide every update"),
    ),
    Cause.VALUE_DIVERGENCE: (
        Tip("lower the critic's learning rate, normalize returns or rewards, and clip value targets"),
        Tip("with bootstrapping: update the target network more slowly, use the smaller of two critics"),
    ),
    Cause.POLICY_COLLAPSE: (
        _BACK,
        Tip("lower the learning rate or raise the KL coefficient", Remedy.LOWER_RATE),
        Tip("use larger batches: advantages of few samples are mostly noise"),
        Tip("give the guard rollouts to compare policies with (steadystep.rl.Controls), so that it can roll back"),
    ),
    Cause.FLAT_REWARD: (
        Tip(
            "a constant reward teaches nothing: check that the reward function reads the completions, and that within "
            "a group some attempts succeed and some fail (easier prompts, larger groups)"
        ),
    ),
}
"""What to change for each cause that lies in the policy."""
