"""NOTICE: one failure mode per file. Plain numbers in, findings out."""

from steadystep.detectors.attention_logits import AttentionLogitGrowth
from steadystep.detectors.buffer_jump import BufferJump
from steadystep.detectors.clip_rate import ClipRate
from steadystep.detectors.constant_prediction import ConstantPrediction
from steadystep.detectors.cooldown import Cooldown
from steadystep.detectors.damaged_state import DamagedState
from steadystep.detectors.dead_units import DeadUnits
from steadystep.detectors.detector import Detector, has_what_it_needs, occasional, sees_every_step
from steadystep.detectors.early_divergence import EarlyDivergence
from steadystep.detectors.embedding_growth import EmbeddingGrowth
from steadystep.detectors.entropy_collapse import EntropyCollapse
from steadystep.detectors.flat_reward import FlatReward
from steadystep.detectors.gradient_spike import GradientSpike
from steadystep.detectors.growing_gradient import GrowingGradient
from steadystep.detectors.input_scale import InputScale
from steadystep.detectors.kl_blow_up import KlBlowUp
from steadystep.detectors.learning_rate_bounds import LearningRateBounds
from steadystep.detectors.learning_rate_creep import LearningRateCreep
from steadystep.detectors.learning_rate_jump import LearningRateJump
from steadystep.detectors.loss_scale import LossScale
from steadystep.detectors.loss_spike import LossSpike
from steadystep.detectors.lost_moments import LostMoments
from steadystep.detectors.metric_bounds import MetricBounds
from steadystep.detectors.no_learning import NoLearning
from steadystep.detectors.non_finite import NonFinite
from steadystep.detectors.not_healing import NotHealing
from steadystep.detectors.odd_replica import OddReplica
from steadystep.detectors.oscillation import Oscillation
from steadystep.detectors.perfection import SuspiciousPerfection
from steadystep.detectors.poisoned_moments import PoisonedMoments
from steadystep.detectors.rms_surprise import RmsSurprise
from steadystep.detectors.same_batch import SameBatch
from steadystep.detectors.saturated_units import SaturatedUnits
from steadystep.detectors.short_warmup import ShortWarmup
from steadystep.detectors.slow_divergence import SlowDivergence
from steadystep.detectors.update_ratio import UpdateRatio
from steadystep.detectors.vanishing_gradient import VanishingGradient
from steadystep.detectors.weight_jump import WeightJump
from steadystep.detectors.worse_than_best import WorseThanBest
from steadystep.detectors.zero_gradient import ZeroGradient

__all__ = [
    "AttentionLogitGrowth",
    "BufferJump",
    "ClipRate",
    "ConstantPrediction",
    "Cooldown",
    "DamagedState",
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
    "NoLearning",
    "NonFinite",
    "NotHealing",
    "OddReplica",
    "Oscillation",
    "PoisonedMoments",
    "RmsSurprise",
    "SameBatch",
    "SaturatedUnits",
    "ShortWarmup",
    "SlowDivergence",
    "SuspiciousPerfection",
    "UpdateRatio",
    "VanishingGradient",
    "WeightJump",
    "WorseThanBest",
    "ZeroGradient",
    "has_what_it_needs",
    "occasional",
    "sees_every_step",
]
