"""The closed list of causes, and advice for each."""

from enum import StrEnum


class Cause(StrEnum):
    """Why a step, or a run, went wrong."""

    HEALTHY = "healthy"
    """Nothing is wrong."""
    # numbers that are no numbers
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
    # the policy
    POLICY_DRIFT = "policy-drift"
    """The policy drifts away from its reference."""
    ENTROPY_COLLAPSE = "entropy-collapse"
    """The policy has stopped exploring."""
    FLAT_REWARD = "flat-reward"
    """The reward is always the same."""
    METRIC_OUT_OF_BOUNDS = "metric-out-of-bounds"
    """A metric is non-finite or outside its bounds."""
    # the result
    NO_LEARNING = "no-learning"
    """The loss is where it began."""
    SUSPICIOUS_PERFECTION = "suspicious-perfection"
    """The loss is implausibly close to zero."""
    UNKNOWN = "unknown"
    """No rule explains the findings."""


ADVICE: dict[Cause, str] = {
    Cause.HEALTHY: "",
    Cause.NON_FINITE_INPUT: "clean the data: this batch holds NaN or infinity before the model has seen it",
    Cause.FORWARD_OVERFLOW: "a value passed 65504, the largest fp16 number, in the forward pass; no loss scale cures "
    "that: use bf16, or keep the overflowing module in fp32",
    Cause.NON_FINITE_LOSS: "look for log(0), 0/0, a mean over no tokens, or weights that have grown too large",
    Cause.NON_FINITE_GRADIENT: "backward failed where forward did not: look for sqrt or a norm at exactly 0, or "
    "torch.where over an invalid branch, or for gradients too large to be squared",
    Cause.SCALE_OVERFLOW: "routine for fp16: the loss scale was too high and has been halved",
    Cause.NON_FINITE_BUFFER: "an input so large that a running statistic overflowed: check the scale of this batch",
    Cause.LOSS_SCALE_COLLAPSE: "fp16 overflows again and again: use bf16, lower the learning rate, or keep the modules "
    "with the largest activations in fp32",
    Cause.GRADIENT_UNDERFLOW: "gradients round to zero in fp16: use bf16, or a loss scaler with a higher scale; look "
    "at the loss too, a mean over very many elements makes gradients small",
    Cause.SCHEDULE_ERROR: "the schedule gave a learning rate that cannot be meant: print it for the steps around this "
    "one; a scheduler that was restarted or stepped twice is the usual reason",
    Cause.MISSING_ZERO_GRAD: "gradients pile up from step to step: call optimizer.zero_grad() after every update, or "
    "let guard.step() do it",
    Cause.CLOSURE_NOT_REPEATABLE: "pass the data as step(closure, batch=...), so that the closure can be run again",
    Cause.EXCEPTION_IN_STEP: "the closure raised: look at the batch of this step and at the line the error names; with "
    "recovery.max_exceptions = 0 it is raised with its traceback",
    Cause.CLIPPING_TOO_TIGHT: "most updates are clipped, so the limit and not the gradient sets their size: raise "
    "max_grad_norm above the usual norm, or lower the learning rate if that makes the run unstable; gradients this "
    "large often come from targets or a loss that want scaling",
    Cause.LEARNING_RATE_TOO_HIGH: "divide the learning rate by 3 to 10, or warm it up over more steps; find_lr shows "
    "the range that works",
    Cause.LEARNING_RATE_TOO_LOW: "multiply the learning rate by 10 and look again; find_lr shows the range that works",
    Cause.BATCH_SIZE_UNFIT: "the noise between batches hides the progress: use larger batches or "
    "gradient_accumulation_steps, or a lower learning rate",
    Cause.OSCILLATION: "the loss jumps up and down around one level: lower the learning rate or the momentum, or use "
    "larger batches",
    Cause.BAD_BATCH: "look at the data of this step: wrong labels, a wrong scale, a corrupt file; a single one needs "
    "no other change",
    Cause.DATA_SHIFT: "the weights still do as well on older data: the data has changed. Look at what the loader gives "
    "from here on, and shuffle more widely if it is a new part of the set",
    Cause.UNSCALED_DATA: "bring inputs to mean 0 and standard deviation 1 for each feature (images: divide by 255), "
    "and targets of a regression too",
    Cause.REPEATED_BATCH: "the loader gives the same batch again and again: look for next(iter(loader)) in the "
    "loop, a sampler that is not advanced, a worker that hangs on one file",
    Cause.EXPLODING_GRADIENT: "clip the gradient (max_grad_norm: 1.0) and warm the learning rate up; if it comes back, "
    "add normalisation layers or lower the learning rate",
    Cause.VANISHING_GRADIENT: "the first layers hardly learn: use ReLU or GELU instead of sigmoid or tanh, residual "
    "connections, normalisation layers, and an initialisation made for the activation",
    Cause.ZERO_GRADIENT: "parts of the model get no gradient at all: look for an output that cannot reach the targets "
    "(a ReLU at the end), for detach() or argmax, and for frozen or unused layers",
    Cause.DEAD_UNITS: "units that are zero for every input no longer learn: lower the learning rate, use LeakyReLU or "
    "GELU, and start biases at 0",
    Cause.SATURATION: "sigmoids or tanhs are stuck in their flat part: scale the inputs, start with smaller weights, "
    "or put normalisation layers before them",
    Cause.EMBEDDING_GROWTH: "embedding rows grow without end: steadystep.layers.BoundedEmbedding(max_norm=...) keeps "
    "them in bounds; a lower learning rate for the embedding, shrink_gradient or weight decay slow them down",
    Cause.ATTENTION_LOGIT_GROWTH: "attention comes down to single positions: use steadystep.layers.StableAttention "
    "(qk_norm, or logit_cap), or qk_clip_ after each update, which needs no other layer; a lower learning rate or a "
    "smaller beta2 (0.95) slows the growth down. The logits of the output are another matter: z_loss holds those",
    Cause.POOR_INITIALISATION: "the first weights are unfit (all equal, or far too large): use "
    "steadystep.init.initialise_ with a recipe that suits the activations",
    Cause.POISONED_MOMENTS: "one huge gradient went into the optimizer's moments and will hold back updates for "
    "hundreds of steps: clip the gradient, or use a smaller beta2 (0.95)",
    Cause.LOST_MOMENTS: "what the optimizer had learned about the gradients is gone: load its state together with the "
    "weights, and keep one optimizer for the whole run; if it was meant, warm the learning rate up again",
    Cause.DAMAGED_WEIGHTS: "the weights themselves have become worse: roll back to a checkpoint from before the first "
    "sign, with a lower learning rate",
    Cause.ODD_REPLICA: "all ranks took the same updates, and their weights differ: suspect the memory or the "
    "accelerator of that rank, and code that changes weights on some ranks only",
    Cause.POLICY_DRIFT: "the policy runs away from its reference: raise the KL coefficient, lower the learning rate, "
    "or take fewer updates per batch of rollouts; the samples of these steps show whether the reward is being gamed",
    Cause.ENTROPY_COLLAPSE: "the policy has stopped exploring: add an entropy bonus, raise the sampling temperature or "
    "the KL coefficient, lower the learning rate, or roll back to a checkpoint from before",
    Cause.FLAT_REWARD: "a reward that is always the same teaches nothing: check that the reward function reads the "
    "completions, and that within a group some attempts succeed and some fail (easier prompts, larger groups)",
    Cause.METRIC_OUT_OF_BOUNDS: "look at what this metric is computed from: a ratio of zero, an empty mask, log(0)",
    Cause.NO_LEARNING: "check that the labels belong to the inputs, that the loss fits the output, and that the "
    "optimizer holds the model's parameters; try to overfit a single batch first",
    Cause.SUSPICIOUS_PERFECTION: "a loss of nothing is rarely true: look for the target among the inputs, for a loss "
    "over no elements, and for a set that is too easy",
    Cause.UNKNOWN: "no rule explains this: look at the findings in the evidence",
}
"""What to change for each cause."""
