"""What each detector's state looks like, by the detector's name. One that is not listed here is a user's own."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from steadystep.state import (
    GrowthState,
    LevelState,
    Losses,
    NothingState,
    PartState,
    RiseState,
    RunsState,
    Size,
    Sizes,
    StepNumber,
    Steps,
    SumState,
    TailState,
    WholeNumber,
)
from steadystep.state.policy_detectors import POLICY_DETECTORS


class NonFiniteState(PartState):  # noqa: D101 - each is named after its detector
    without_gradient: Steps = Field(default_factory=list)
    told: bool = False


class GradientSpikeState(PartState):  # noqa: D101
    level: LevelState
    losses: LevelState
    tail: TailState
    recent: Losses
    tensors: list[list[Size]]
    until_next: int
    learned: WholeNumber
    largest_update: Size
    admitted: float | None
    calm_tail: TailState | None = None
    since: Losses = Field(default_factory=list)
    bearable: float | None = None
    counted: tuple[WholeNumber, WholeNumber] | None = None


class NotHealingState(PartState):  # noqa: D101
    level: LevelState
    rise: RiseState
    first: float | None
    count: WholeNumber
    since: int
    raised: Losses
    stretch: tuple[int, int, int, bool]


class BufferJumpState(PartState):  # noqa: D101
    largest: dict[str, Size]
    seen: dict[str, WholeNumber]
    in_a_row: WholeNumber

    @model_validator(mode="after")
    def _same_names(self) -> Self:
        if self.largest.keys() != self.seen.keys():
            raise ValueError("largest and seen have different names")
        return self


class InputScaleState(PartState):  # noqa: D101
    largest: Size
    seen: WholeNumber
    in_a_row: WholeNumber


class SameBatchState(PartState):  # noqa: D101
    last: float | None
    differed: WholeNumber
    in_a_row: WholeNumber


class WeightJumpState(PartState):  # noqa: D101
    last: dict[str, Size]
    looked: WholeNumber
    at: StepNumber
    rate: Size
    changes: dict[str, Sizes]


class SlowDivergenceState(PartState):  # noqa: D101
    sum: SumState
    rise: RiseState
    losses: Losses
    block: Losses
    blocks: Losses
    means: Losses
    level: tuple[float | None, float | None, float | None, float | None, float | None]
    signed: StepNumber
    tailed: float
    seen: WholeNumber
    said: tuple[float, int, bool, bool]


class WorseThanBestState(PartState):  # noqa: D101
    rise: RiseState
    losses: Losses
    levels: tuple[float | None, float | None]
    best_step: StepNumber
    worse: WholeNumber
    signed: StepNumber


class PilingState(PartState):  # noqa: D101
    level: LevelState
    losses: LevelState
    rest: Annotated[list[float], Field(max_length=16)]
    jitter: Size
    last: float | None
    stretch: Annotated[list[tuple[float, float]], Field(max_length=32)]
    told: bool


class GrowingGradientState(PartState):  # noqa: D101
    norms: Sizes
    done: bool
    piling: PilingState | None = None


class OscillationState(PartState):  # noqa: D101
    losses: Annotated[list[float], Field(max_length=63)]
    start: float | None
    calmest: tuple[Size, float]
    rest: dict[Literal["info", "warn"], WholeNumber]


class NoLearningState(PartState):  # noqa: D101
    first: Losses
    last: Losses
    seen: WholeNumber
    lr: Size
    done: bool


class PerfectionState(PartState):  # noqa: D101
    first: float | None
    zeros: WholeNumber
    tiny: WholeNumber
    done: bool


class InARowState(PartState):  # noqa: D101
    in_a_row: WholeNumber


class ZeroGradientState(PartState):  # noqa: D101
    in_a_row: WholeNumber
    zeros: dict[str, WholeNumber]
    alive: tuple[WholeNumber, dict[str, WholeNumber], list[str]] | None = None
    said: tuple[WholeNumber, int] | tuple[WholeNumber, int, WholeNumber] | None = None


class UpdateRatioState(PartState):  # noqa: D101
    above: WholeNumber
    below: WholeNumber


class PoisonedMomentsState(PartState):  # noqa: D101
    moments: dict[str, Sizes]
    norms: dict[str, Sizes]
    peak: Size
    peaks: Sizes
    recent: Sizes | None = None
    limit: Size | None = None
    num_large: WholeNumber = 0
    jumped_in_a_row: WholeNumber
    clean: StepNumber | None


class SaturatedUnitsState(PartState):  # noqa: D101
    runs: RunsState
    first: float | None


class ConstantPredictionState(PartState):  # noqa: D101
    first: float | None
    losses: Losses
    peak: float
    levels: Losses
    seen: WholeNumber
    done: bool


class DamagedStateState(PartState):  # noqa: D101
    clean: StepNumber
    gradient: Size
    in_a_row: dict[str, WholeNumber]


class LostMomentsState(PartState):  # noqa: D101
    looks: list[tuple[StepNumber, dict[str, Size]]]


class EarlyDivergenceState(PartState):  # noqa: D101
    first: float | None
    seen: WholeNumber
    since: StepNumber | None
    in_a_row: WholeNumber
    asked: bool


class ShortWarmupState(PartState):  # noqa: D101
    first: Size | None
    last: Size
    steps: WholeNumber
    done: bool


class ClipRateState(PartState):  # noqa: D101
    steps: Annotated[int, Field(ge=0, lt=100)]
    clipped: WholeNumber
    far: WholeNumber
    blocks: WholeNumber
    recent: Steps
    rest: WholeNumber
    warned: bool


class LearningRateBoundsState(PartState):  # noqa: D101
    lr: Size | None
    before: Size | None
    same: WholeNumber
    told: dict[str, bool]


class LearningRateCreepState(PartState):  # noqa: D101
    rates: tuple[Size, Size, Size | None]
    steps: tuple[WholeNumber, int]


class LearningRateJumpState(PartState):  # noqa: D101
    rates: tuple[Size, Size, Size, Size]
    recent: Sizes
    counts: tuple[WholeNumber, WholeNumber, WholeNumber]


class LossScaleState(PartState):  # noqa: D101
    steps: WholeNumber
    scale: Size | None
    cuts: Steps
    until: StepNumber


DETECTORS: dict[str, Any] = {
    "attention-logit-growth": GrowthState,
    "buffer-jump": BufferJumpState,
    "clip-rate": ClipRateState,
    "constant-prediction": ConstantPredictionState,
    "damaged-state": DamagedStateState,
    "lost-moments": LostMomentsState,
    "dead-units": RunsState,
    "early-divergence": EarlyDivergenceState,
    "embedding-growth": GrowthState,
    "gradient-spike": GradientSpikeState,
    "growing-gradient": GrowingGradientState,
    "input-scale": InputScaleState,
    "learning-rate-bounds": LearningRateBoundsState,
    "learning-rate-creep": LearningRateCreepState,
    "learning-rate-jump": LearningRateJumpState,
    "loss-scale": LossScaleState,
    "loss-spike": LevelState,
    "no-learning": NoLearningState,
    "non-finite": NonFiniteState,
    "not-healing": NotHealingState,
    "bit-flip": NothingState,
    "miscomputation": NothingState,
    "odd-replica": NothingState,
    "oscillation": OscillationState,
    "poisoned-moments": PoisonedMomentsState,
    "rms-surprise": dict[str, Sizes],
    "same-batch": SameBatchState,
    "saturated-units": SaturatedUnitsState,
    "short-warmup": ShortWarmupState,
    "slow-divergence": SlowDivergenceState,
    "suspicious-perfection": PerfectionState,
    "update-ratio": UpdateRatioState,
    "vanishing-gradient": InARowState,
    "weight-jump": WeightJumpState,
    "worse-than-best": WorseThanBestState,
    "zero-gradient": ZeroGradientState,
    **POLICY_DETECTORS,
}
