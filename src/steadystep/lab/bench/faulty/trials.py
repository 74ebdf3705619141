"""Which faults, on which tasks, and when. Every kind of `steadystep.faults` is among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

ALL = ("gpt", "clusters", "regression", "rnn")
NATS = ("gpt", "clusters", "rnn")
"""Their loss is a cross-entropy."""
REAL_INPUTS = ("clusters", "regression")
"""Their batches are real numbers and have targets of their own."""

NUM_STEPS, NUM_SLOW_STEPS = 480, 640


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to break a run."""

    name: str
    spec: Mapping[str, Any]
    """For `faults.parse`, without `at`."""
    tasks: tuple[str, ...] = ALL
    slow: bool = False
    """It creeps: what counts is how long before the damage it is noticed."""
    precision: Literal["fp32", "fp16"] = "fp32"
    num_steps: int = NUM_STEPS


def first_step(seed: int) -> int:
    """When it begins: 200 to 290, by the seed."""
    return 200 + 10 * (seed % 10)


_TRIALS = (
    Trial(name="gradients x10", spec={"kind": "grad-scale", "factor": 10}),
    Trial(name="gradients x1e4", spec={"kind": "grad-scale", "factor": 1e4}),
    Trial(name="gradients x10 for good", spec={"kind": "grad-scale", "factor": 10, "for": "ever"}),
    Trial(name="sign flipped for 20", spec={"kind": "grad-sign-flip", "for": 20}),
    Trial(name="NaN in a gradient", spec={"kind": "bad-gradient"}),
    Trial(name="Inf in a gradient", spec={"kind": "bad-gradient", "value": "inf"}),
    Trial(name="no zero_grad for 20", spec={"kind": "missing-zero-grad", "for": 20}),
    Trial(name="fp16 overflow for 3", spec={"kind": "fp16-overflow", "for": 3}, tasks=REAL_INPUTS, precision="fp16"),
    Trial(
        name="fp16 underflow for 20", spec={"kind": "fp16-underflow", "for": 20}, tasks=REAL_INPUTS, precision="fp16"
    ),
    Trial(name="NaN in a weight", spec={"kind": "bad-weight"}),
    Trial(name="flipped bit", spec={"kind": "bit-flip"}),
    Trial(name="frozen layer", spec={"kind": "frozen-layer", "for": "ever"}),
    Trial(name="zeroed layer", spec={"kind": "zeroed-layer"}),
    Trial(name="dead ReLUs", spec={"kind": "dead-relus"}, tasks=("clusters",)),
    Trial(name="moments lost", spec={"kind": "moments-scale", "factor": 0}),
    Trial(name="moments x1000", spec={"kind": "moments-scale", "factor": 1000}),
    Trial(name="LR x100 for 20", spec={"kind": "lr-scale", "factor": 100, "for": 20}),
    Trial(name="LR x30 for good", spec={"kind": "lr-scale", "factor": 30, "for": "ever"}),
    Trial(name="LR +1 % a step", spec={"kind": "lr-creep", "growth": 1.01}, slow=True, num_steps=NUM_SLOW_STEPS),
    Trial(name="LR +5 % a step", spec={"kind": "lr-creep", "growth": 1.05}),
    Trial(name="NaN loss, five", spec={"kind": "bad-loss", "for": 5}),
    Trial(
        name="loss drifts",
        spec={"kind": "loss-drift", "per_step": 0.002},
        tasks=NATS,
        slow=True,
        num_steps=NUM_SLOW_STEPS,
    ),
    Trial(name="NaN in the input", spec={"kind": "bad-input"}, tasks=REAL_INPUTS),
    Trial(name="inputs x1e6", spec={"kind": "data-scale", "factor": 1e6}, tasks=REAL_INPUTS),
    Trial(name="targets x1e6", spec={"kind": "data-scale", "factor": 1e6, "part": 1}, tasks=("regression",)),
    Trial(name="constant input for 20", spec={"kind": "data-constant", "for": 20}),
    Trial(name="labels shuffled for 20", spec={"kind": "shuffled-labels", "for": 20}, tasks=REAL_INPUTS),
    Trial(name="same batch for 20", spec={"kind": "stale-batch", "for": 20}),
)

TRIALS: dict[str, Trial] = {trial.name: trial for trial in _TRIALS}
"""By the name shown in tables."""
