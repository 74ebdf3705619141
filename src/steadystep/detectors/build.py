"""Which detectors the settings ask for."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steadystep.config import Config
from steadystep.detectors.adam_moments import LostMoments, PoisonedMoments, RmsSurprise
from steadystep.detectors.advantages import BadAdvantages, DeadGroups
from steadystep.detectors.clip_rate import ClipRate
from steadystep.detectors.corruption import BitFlips, DamagedState, Miscomputations, OddReplica, WeightJump
from steadystep.detectors.detector import Cooldown, Detector
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

if TYPE_CHECKING:
    from torch.optim import Optimizer  # why not at run time: logs are read without torch

MEASURED_BY_THE_PAST = frozenset(
    kind.name
    for kind in (
        *(EarlyDivergence, GradientSpike, LossSpike, LostMoments, NotHealing, SlowDivergence, WeightJump),
        WorseThanBest,
    )
)
"""Their limits come from steps before; weights that the loop has replaced begin a past of their own."""

_QUIET_STEPS = 400  # between two warnings of one detector: three in 1,000 steps at most


def build_detectors(
    config: Config,
    *,
    scheduled: bool = False,
    beta2: float | None = None,
    decay: float | None = None,
    scale_free: bool = False,
    extra: Sequence[Detector] = (),
) -> tuple[Detector, ...]:
    """All detectors these settings ask for, the gate first.

    `scheduled` says that the guard sets the learning rate, `scale_free` that the optimizer divides by the size of the
    gradient; `decay` is the least beta2 of an optimizer that is known to be Adam.
    """
    training, watch = config.training, config.monitoring
    if not training.stability_monitoring:
        return (NonFinite(), *extra)
    found = _for_every_run(config)
    if not scheduled:
        found += [LearningRateJump(), LearningRateCreep()]
    if beta2 is not None:
        found.append(ShortWarmup(beta2=beta2))
    if decay is not None:
        found.append(_rationed(LostMoments(beta2=decay)))
    if watch.lr_min is not None or watch.lr_max is not None:
        found.append(LearningRateBounds(watch.lr_min, watch.lr_max))
    if training.clip_norm is not None:
        found.append(ClipRate(training.clip_norm, scale_free=scale_free))
    if training.mixed_precision == "fp16":
        found.append(LossScale())
    return (*found, *extra)


def _for_every_run(config: Config) -> list[Detector]:
    return [*_of_every_step(config), *_of_probes_and_metrics()]


def _of_every_step(config: Config) -> list[Detector]:
    watch = config.monitoring
    return [
        NonFinite(),
        GradientSpike(
            factor=watch.explosion_threshold,
            history=watch.gradient_history_size,
            clipped_to=_clipped_to(config),
        ),
        LossSpike(deviations=watch.divergence_threshold, history=watch.loss_window_size),
        NotHealing(deviations=watch.divergence_threshold, history=watch.loss_window_size),
        EarlyDivergence(),
        BufferJump(),
        InputScale(),
        _rationed(SameBatch()),
        _rationed(WeightJump()),
        DamagedState(),
        OddReplica(),
        BitFlips(),
        Miscomputations(),
        SlowDivergence(),
        _rationed(WorseThanBest()),
        _rationed(GrowingGradient()),
        Oscillation(),
        NoLearning(),
        ConstantPrediction(),
        SuspiciousPerfection(),
        _rationed(VanishingGradient()),
        ZeroGradient(),
    ]


def _of_probes_and_metrics() -> list[Detector]:
    return [
        UpdateRatio(),
        PoisonedMoments(),
        Cooldown(RmsSurprise(), quiet_steps=500),
        _rationed(DeadUnits()),
        _rationed(SaturatedUnits()),
        _rationed(EmbeddingGrowth()),
        _rationed(AttentionLogitGrowth()),
        _rationed(KlBlowUp()),
        _rationed(EntropyCollapse()),
        _rationed(FlatReward()),
        _rationed(RatioExplosion()),
        _rationed(PolicyMismatch()),
        _rationed(DeadGroups()),
        _rationed(BadAdvantages()),
        _rationed(RewardCollapse()),
        _rationed(RewardHacking()),
        _rationed(ValueDivergence()),
        _rationed(MetricBounds()),
    ]


def _rationed(detector: Detector) -> Detector:
    """One warning at a time: what comes and goes, or comes for one layer after another, is a note until then."""
    return Cooldown(detector, quiet_steps=_QUIET_STEPS, as_notes=True)


def beta2_of(optimizer: "Optimizer") -> float | None:
    """How long Adam's second moment remembers; None for optimizers without one."""
    betas = next((group["betas"] for group in optimizer.param_groups if "betas" in group), None)
    if not isinstance(betas, tuple | list) or len(betas) < 2 or not isinstance(betas[1], float):
        return None
    return betas[1] if 0.0 < betas[1] < 1.0 else None


def decay_of(optimizer: "Optimizer") -> float | None:
    """The least beta2 of torch's own Adam and its like; None where others may change second moments by other rules."""
    each = getattr(optimizer, "each", (optimizer,))
    if not all(type(one).__module__.startswith("torch.optim.") for one in each):
        return None
    known = [beta2_of(one) for one in each if type(one).__name__ in ("Adam", "AdamW", "NAdam", "RAdam")]
    decays = [group["betas"][1] for one in each for group in one.param_groups if "betas" in group]
    return min(decays) if known and None not in known and all(isinstance(beta, float) for beta in decays) else None


def is_scale_free(optimizer: "Optimizer") -> bool:
    """Whether gradients ten times as large make the same steps: all but plain gradient descent."""
    return all(type(each).__name__ not in ("SGD", "ASGD", "LBFGS") for each in getattr(optimizer, "each", (optimizer,)))


def _clipped_to(config: Config) -> float:
    """What the user's own clipping brings any norm down to; a learned rule holds back what stands out by itself."""
    training = config.training
    if training.clip_rule is not None and training.gradient_clipping is not False:
        return 0.0
    return math.inf if training.clip_norm is None else training.clip_norm
