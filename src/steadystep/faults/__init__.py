"""Trouble on purpose, for any loop: deterministic by step, and nothing is left behind but what the fault itself did."""

from steadystep.faults.card import Scorecard, scorecard
from steadystep.faults.data import bad_input, constant_data, scaled_data, shuffled_labels
from steadystep.faults.fault import NO_FAULT, Fault
from steadystep.faults.fp16_range import fp16_overflow, fp16_underflow
from steadystep.faults.gradients import bad_gradient, scaled_gradients
from steadystep.faults.kinds import KINDS
from steadystep.faults.layer import dead_relus, frozen_layer, zeroed_layer
from steadystep.faults.learning_rate import creeping_lr, scaled_lr
from steadystep.faults.leftovers import missing_zero_grad
from steadystep.faults.losses import bad_loss, drifting_loss
from steadystep.faults.moments import scaled_moments
from steadystep.faults.since import since
from steadystep.faults.spec import parse
from steadystep.faults.stale import stale_batch
from steadystep.faults.together import on_rank, together
from steadystep.faults.weights import bad_weight, flipped_bit

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
