"""Every rule: its code, its name, how bad it is, and why it matters in one sentence."""

from dataclasses import dataclass
from typing import final

from steadystep.lint.report import HitSeverity


@final
@dataclass(frozen=True, slots=True)
class LintRule:
    """One fault that `steadystep check` detects."""

    code: str
    """Code, such as "SS101"."""
    name: str
    """Short name."""
    severity: HitSeverity
    """`advice` does not count as a fault."""
    why: str
    """Why it matters, in one sentence."""


RULES: dict[str, LintRule] = {
    rule.code: rule
    for rule in (
        LintRule(
            "SS101", "clip-before-unscale", "error",
            "the gradients still carry the loss scale (65536 at first), so the limit cuts nearly all of them away",
        ),
        LintRule(
            "SS102", "clip-after-step", "error",
            "the update was made with the unclipped gradients; clipping what was already used does nothing",
        ),
        LintRule(
            "SS103", "clip-before-backward", "error",
            "the gradients of this batch do not exist yet: old or empty ones are clipped and the new ones are not",
        ),
        LintRule(
            "SS104", "schedule-before-step", "warning",
            "the first value of the schedule is skipped and every later one comes a step early",
        ),
        LintRule(
            "SS105", "schedule-on-skipped-steps", "error",
            "the schedule counts iterations without an update, so warmup and decay end too early",
        ),
        LintRule(
            "SS106", "zero-grad-missing", "error",
            "gradients add up over all batches so far: the update follows their sum, which grows without limit",
        ),
        LintRule(
            "SS107", "zero-grad-before-step", "error",
            "the gradients are cleared after backward() and before the update: nothing is learned",
        ),
        LintRule(
            "SS108", "step-without-backward", "error",
            "the optimizer steps on gradients that are empty or from before: this batch has no effect",
        ),
        LintRule(
            "SS109", "accumulation-not-divided", "warning",
            "the gradient is a sum, so learning rate and clipping mean something else for each number of micro-batches",
        ),
        LintRule(
            "SS110", "needless-retain-graph", "warning",
            "the graph is kept although nothing runs backward through it again: it costs memory, and hints at a "
            "graph that spans batches",
        ),
        LintRule(
            "SS111", "clip-after-step-in-backward", "error",
            "each parameter is stepped by a hook inside backward(); a clip after it finds nothing left to limit",
        ),
        LintRule(
            "SS112", "schedule-free-mode", "error",
            "a schedule-free optimizer has two sets of weights: train() selects those to step, eval() those to use",
        ),
        LintRule(
            "SS201", "scaler-with-bf16", "warning",
            "bf16 has the range of fp32 and nothing to scale; a scaler can only skip good steps",
        ),
        LintRule(
            "SS202", "fp16-without-scaler", "error",
            "gradients below 6e-8 become zero in fp16 and large ones infinite: the run stalls or turns NaN",
        ),
        LintRule(
            "SS203", "scaler-update-missing", "error",
            "the loss scale never adapts: after the first overflow every step is skipped forever",
        ),
        LintRule(
            "SS204", "step-past-the-scaler", "error",
            "the update is made with gradients that are still multiplied by the loss scale, infinities included",
        ),
        LintRule(
            "SS301", "loss-cut-from-graph", "error",
            "the value is detached from the graph, so no gradient reaches the weights",
        ),
        LintRule(
            "SS302", "total-keeps-graphs", "warning",
            "every batch's graph stays alive through the running total: memory grows until the epoch ends",
        ),
        LintRule(
            "SS303", "softmax-before-cross-entropy", "error",
            "cross-entropy applies log-softmax itself; on probabilities gradients are tiny and the loss stays high",
        ),
        LintRule(
            "SS304", "sigmoid-before-bce-with-logits", "error",
            "the loss applies the sigmoid itself; done twice, predictions are squeezed into 0.5 to 0.73",
        ),
        LintRule(
            "SS305", "nll-of-probabilities", "error",
            "NLLLoss expects log-probabilities; of probabilities it cannot fall below -1, and its gradient is wrong",
        ),
        LintRule(
            "SS306", "hidden-state-not-detached", "error",
            "the hidden state carries the graph of every earlier batch: backward fails, or slows down with each "
            "batch",
        ),
        LintRule(
            "SS307", "log-of-zero", "warning",
            "a probability that rounds to zero has a logarithm of -inf: the loss becomes infinite, its gradient NaN",
        ),
        LintRule(
            "SS308", "prediction-through-numpy", "error",
            "numpy keeps values, not the graph: the loss has no gradient with respect to the weights",
        ),
        LintRule(
            "SS401", "evaluation-in-training-mode", "error",
            "dropout stays on and batch norm learns from the validation data: the score is noisy and the model changes",
        ),
        LintRule(
            "SS402", "evaluation-with-graph", "warning",
            "an unused graph is built: evaluation needs several times the memory and is slower",
        ),
        LintRule(
            "SS403", "never-back-to-training-mode", "error",
            "after the first evaluation dropout and batch norm stay off for the rest of the training",
        ),
        LintRule(
            "SS404", "validation-on-training-data", "error",
            "the number called validation is measured on data the model was fitted to: overfitting is invisible",
        ),
        LintRule(
            "SS501", "warmup-too-short", "warning",
            "Adam's second moment needs about 2/(1-beta2) steps to settle; full steps before that often diverge",
        ),
        LintRule(
            "SS502", "unusual-learning-rate", "warning",
            "far outside the usual range of this optimizer: it will diverge, or not learn at all",
        ),
        LintRule(
            "SS503", "absurd-clip-value", "warning",
            "a limit this large never clips, and one this small keeps only the direction of every update",
        ),
        LintRule(
            "SS504", "decay-on-norms", "warning",
            "decay pulls scales and offsets toward zero, which the norm layer has to undo; it does not regularize",
        ),
        LintRule(
            "SS505", "nan-filter-on", "warning",
            "losses that are NaN are left out of the log, or replaced in it, so a failed run looks healthy",
        ),
        LintRule(
            "SS601", "parameters-made-after-optimizer", "error",
            "the optimizer holds the old parameters: the new ones are never updated",
        ),
        LintRule(
            "SS602", "model-moved-after-optimizer", "warning",
            "torch requires the move first: if it creates new parameters, the optimizer keeps updating the old ones",
        ),
        LintRule(
            "SS603", "wrong-parameters-clipped", "error",
            "the network that is updated next is not the one that was clipped",
        ),
        LintRule(
            "SS604", "wrong-parameters-optimized", "error",
            "the loss depends on another network than the one the optimizer updates: nothing is learned",
        ),
        LintRule(
            "SS605", "muon-without-the-rest", "error",
            "Muon takes matrices only; biases, norms and embeddings are in no optimizer and keep their first values",
        ),
        LintRule(
            "SS606", "requires-grad-typo", "error",
            "Python accepts any attribute name: the parameter keeps its requires_grad, so nothing is frozen",
        ),
        LintRule(
            "SS701", "sampler-epoch-not-set", "warning",
            "without set_epoch() a DistributedSampler shuffles every epoch in the same way",
        ),
        LintRule(
            "SS702", "rank-local-skip", "error",
            "backward() is collective under DDP and FSDP: a rank that leaves it out makes the others wait forever",
        ),
        LintRule(
            "SS703", "generator-shared-by-workers", "warning",
            "each worker begins with a copy of the generator, in every epoch: augmentations repeat across workers",
        ),
        LintRule(
            "SS704", "checkpoint-without-optimizer", "warning",
            "a resumed run starts with empty moments at a full learning rate, which often shows as a loss spike",
        ),
    )
}  # fmt: skip
"""All rules of `steadystep check`, by code."""


def nearest_code(code: str) -> str:
    """A clause for an error message about an unknown code."""
    from steadystep._utils.text import alike

    close = alike(code.upper(), RULES)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(RULES)}"
