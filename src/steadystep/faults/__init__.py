"""Fault injection for any loop: deterministic by step; hooks are removed after each step."""

from steadystep.faults.bits import flipped_bit
from steadystep.faults.fault import NO_FAULT, Fault, on_rank, since, together
from steadystep.faults.kinds import KINDS, parse
from steadystep.faults.optimizer import (
    bad_gradient,
    bad_loss,
    creeping_lr,
    drifting_loss,
    fp16_overflow,
    fp16_underflow,
    missing_zero_grad,
    scaled_gradients,
    scaled_lr,
    scaled_moments,
)
from steadystep.faults.scorecard import Scorecard, scorecard
from steadystep.faults.tensors import (
    bad_input,
    bad_weight,
    constant_data,
    dead_relus,
    frozen_layer,
    scaled_data,
    shuffled_labels,
    stale_batch,
    zeroed_layer,
)

__all__ = [
    "KINDS",
    "NO_FAULT",
    "Fault",
    "Scorecard",
    "bad_gradient",
    "bad_input",
    "bad_loss",
    "bad_weight",
    "constant_data",
    "creeping_lr",
    "dead_relus",
    "drifting_loss",
    "flipped_bit",
    "fp16_overflow",
    "fp16_underflow",
    "frozen_layer",
    "missing_zero_grad",
    "on_rank",
    "parse",
    "scaled_data",
    "scaled_gradients",
    "scaled_lr",
    "scaled_moments",
    "scorecard",
    "shuffled_labels",
    "since",
    "stale_batch",
    "together",
    "zeroed_layer",
]
