"""NOTICE: one failure mode per file. Plain numbers in, findings out."""

from steadystep.detectors.clip_rate import ClipRate
from steadystep.detectors.cooldown import Cooldown
from steadystep.detectors.detector import Detector
from steadystep.detectors.gradient_spike import GradientSpike
from steadystep.detectors.growing_gradient import GrowingGradient
from steadystep.detectors.learning_rate_bounds import LearningRateBounds
from steadystep.detectors.learning_rate_jump import LearningRateJump
from steadystep.detectors.loss_scale import LossScale
from steadystep.detectors.loss_spike import LossSpike
from steadystep.detectors.no_learning import NoLearning
from steadystep.detectors.non_finite import NonFinite
from steadystep.detectors.not_healing import NotHealing
from steadystep.detectors.oscillation import Oscillation
from steadystep.detectors.perfection import SuspiciousPerfection
from steadystep.detectors.slow_divergence import SlowDivergence
from steadystep.detectors.worse_than_best import WorseThanBest

__all__ = [
    "ClipRate",
    "Cooldown",
    "Detector",
    "GradientSpike",
    "GrowingGradient",
    "LearningRateBounds",
    "LearningRateJump",
    "LossScale",
    "LossSpike",
    "NoLearning",
    "NonFinite",
    "NotHealing",
    "Oscillation",
    "SlowDivergence",
    "SuspiciousPerfection",
    "WorseThanBest",
]
