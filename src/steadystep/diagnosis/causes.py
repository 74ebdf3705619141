"""The closed list of causes, and what to try for each."""

from enum import StrEnum


class Cause(StrEnum):
    """Why a step went wrong."""

    HEALTHY = "healthy"
    NON_FINITE_INPUT = "non-finite-input"
    FORWARD_OVERFLOW = "forward-overflow"
    NON_FINITE_LOSS = "non-finite-loss"
    NON_FINITE_GRADIENT = "non-finite-gradient"
    SCALE_OVERFLOW = "scale-overflow"
    NON_FINITE_BUFFER = "non-finite-buffer"
    SCHEDULE_ERROR = "schedule-error"
    CLOSURE_NOT_REPEATABLE = "closure-not-repeatable"


ADVICE: dict[Cause, str] = {
    Cause.HEALTHY: "",
    Cause.NON_FINITE_INPUT: "clean the data: this batch holds NaN or infinity before the model has seen it",
    Cause.FORWARD_OVERFLOW: "a value passed 65504, the largest fp16 number, in the forward pass; no loss scale cures "
    "that: use bf16, or keep the overflowing module in fp32",
    Cause.NON_FINITE_LOSS: "look for log(0), 0/0, a mean over no tokens, or weights that have grown too large",
    Cause.NON_FINITE_GRADIENT: "backward failed where forward did not: look for sqrt or a norm at exactly 0, or "
    "torch.where over an invalid branch, or for gradients too large to be squared",
    Cause.SCALE_OVERFLOW: "routine for fp16: the loss scale was too high and has been halved",
    Cause.SCHEDULE_ERROR: "the schedule gave a learning rate that is no number: print it for the steps around this one",
    Cause.CLOSURE_NOT_REPEATABLE: "pass the data as step(closure, batch=...), so that the closure can be run again",
    Cause.NON_FINITE_BUFFER: "an input so large that a running statistic overflowed: check the scale of this batch",
}
