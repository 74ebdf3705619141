"""NOTICE: plain numbers in, findings out. Each detector checks for one failure mode."""

from steadystep.detectors.adam_moments import LostMoments, PoisonedMoments, RmsSurprise
from steadystep.detectors.advantages import BadAdvantages, DeadGroups
from steadystep.detectors.clip_rate import ClipRate
from steadystep.detectors.corruption import BitFlips, DamagedState, Miscomputations, OddReplica, WeightJump
from steadystep.detectors.detector import Cooldown, Detector, has_what_it_needs, occasional, sees_every_step
from steadystep.detectors.divergence import EarlyDivergence, ShortWarmup, WorseThanBest
from steadystep.detectors.gradient_build_up import GrowingGradient
from steadystep.detectors.gradient_spike import GradientSpike
from steadystep.detectors.inputs import InputScale, LearningRateBounds, SameBatch
from steadystep.detectors.layers import AttentionLogitGrowth, DeadUnits, EmbeddingGrowth, UpdateRatio
from steadystep.detectors.learning_rate_jump import LearningRateCreep, LearningRateJump
from steadystep.detectors.loss_spike import LossSpike, NotHealing
from steadystep.detectors.metrics import EntropyCollapse, FlatReward, KlBlowUp, MetricBounds
from steadystep.detectors.no_learning import ConstantPrediction, NoLearning, SaturatedUnits
from steadystep.detectors.non_finite import BufferJump, LossScale, NonFinite
from steadystep.detectors.oscillation import Oscillation
from steadystep.detectors.policy import PolicyMismatch, RatioExplosion
from steadystep.detectors.reward import RewardCollapse, RewardHacking
from steadystep.detectors.slow_divergence import SlowDivergence
from steadystep.detectors.value_divergence import ValueDivergence
from steadystep.detectors.vanishing_gradient import SuspiciousPerfection, VanishingGradient, ZeroGradient

__all__ = [
    "AttentionLogitGrowth",
    "BadAdvantages",
    "BitFlips",
    "BufferJump",
    "ClipRate",
    "ConstantPrediction",
    "Cooldown",
    "DamagedState",
    "DeadGroups",
    "DeadUnits",
    "Detector",
    "EarlyDivergence",
    "EmbeddingGrowth",
    "EntropyCollapse",
    "FlatReward",
    "GradientSpike",
    "GrowingGradient",
    "InputScale",
    "KlBlowUp",
    "LearningRateBounds",
    "LearningRateCreep",
    "LearningRateJump",
    "LossScale",
    "LossSpike",
    "LostMoments",
    "MetricBounds",
    "Miscomputations",
    "NoLearning",
    "NonFinite",
    "NotHealing",
    "OddReplica",
    "Oscillation",
    "PoisonedMoments",
    "PolicyMismatch",
    "RatioExplosion",
    "RewardCollapse",
    "RewardHacking",
    "RmsSurprise",
    "SameBatch",
    "SaturatedUnits",
    "ShortWarmup",
    "SlowDivergence",
    "SuspiciousPerfection",
    "UpdateRatio",
    "ValueDivergence",
    "VanishingGradient",
    "WeightJump",
    "WorseThanBest",
    "ZeroGradient",
    "has_what_it_needs",
    "occasional",
    "sees_every_step",
]
