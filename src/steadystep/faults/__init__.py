"""Trouble on purpose, for any loop: deterministic by step, and nothing is left behind but what the fault itself did."""

from steadystep.faults.data import scaled_data
from steadystep.faults.fault import NO_FAULT, Fault
from steadystep.faults.gradients import bad_gradient, scaled_gradients
from steadystep.faults.learning_rate import creeping_lr, scaled_lr
from steadystep.faults.losses import bad_loss, drifting_loss
from steadystep.faults.since import since
from steadystep.faults.weights import flipped_bit

__all__ = [
    "NO_FAULT",
    "Fault",
    "bad_gradient",
    "bad_loss",
    "creeping_lr",
    "drifting_loss",
    "flipped_bit",
    "scaled_data",
    "scaled_gradients",
    "scaled_lr",
    "since",
]
