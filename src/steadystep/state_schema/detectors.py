"""What each detector's state looks like, by the detector's name. One that is not listed here is a user's own."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from steadystep.state_schema.kinds import (
    Count,
    Growth,
    Level,
    Losses,
    Nothing,
    Rise,
    Runs,
    Size,
    Sizes,
    State,
    Step,
    Steps,
    Sum,
    Tail,
)


class NonFinite(State):  # noqa: D101 - each is named after its detector
    without_gradient: Steps = Field(default_factory=list)
    told: bool = False


class GradientSpike(State):  # noqa: D101
    level: Level
    losses: Level
    tail: Tail
    recent: Losses
    tensors: list[list[Size]]
    until_next: int
    learned: Count
    largest_update: Size
    admitted: float | None
    calm_tail: Tail | None = None
    since: Losses = Field(default_factory=list)
    bearable: float | None = None
    counted: tuple[Count, Count] | None = None


class NotHealing(State):  # noqa: D101
    level: Level
    rise: Rise
    first: float | None
    count: Count
    since: int
    raised: Losses
    stretch: tuple[int, int, int, bool]


class BufferJump(State):  # noqa: D101
    largest: dict[str, Size]
    seen: dict[str, Count]
    in_a_row: Count

    @model_validator(mode="after")
    def _same_names(self) -> Self:
        if self.largest.keys() != self.seen.keys():
            raise ValueError("largest and seen have other names")
        return self


class InputScale(State):  # noqa: D101
    largest: Size
    seen: Count
    in_a_row: Count


class SameBatch(State):  # noqa: D101
    last: float | None
    differed: Count
    in_a_row: Count


class WeightJump(State):  # noqa: D101
    last: dict[str, Size]
    looked: Count
    at: Step
    rate: Size
    changes: dict[str, Sizes]


class SlowDivergence(State):  # noqa: D101
    sum: Sum
    rise: Rise
    losses: Losses
    block: Losses
    blocks: Losses
    means: Losses
    level: tuple[float | None, float | None, float | None, float | None, float | None]
    signed: Step
    tailed: float
    seen: Count
    said: tuple[float, int, bool, bool]


class WorseThanBest(State):  # noqa: D101
    rise: Rise
    losses: Losses
    levels: tuple[float | None, float | None]
    best_step: Step
    worse: Count
    signed: Step


class Piling(State):  # noqa: D101
    level: Level
    losses: Level
    rest: Annotated[list[float], Field(max_length=16)]
    jitter: Size
    last: float | None
    stretch: Annotated[list[tuple[float, float]], Field(max_length=32)]
    told: bool


class GrowingGradient(State):  # noqa: D101
    norms: Sizes
    done: bool
    piling: Piling | None = None


class Oscillation(State):  # noqa: D101
    losses: Annotated[list[float], Field(max_length=63)]
    start: float | None
    calmest: tuple[Size, float]
    rest: dict[Literal["info", "warn"], Count]


class NoLearning(State):  # noqa: D101
    first: Losses
    last: Losses
    seen: Count
    lr: Size
    done: bool


class Perfection(State):  # noqa: D101
    first: float | None
    zeros: Count
    tiny: Count
    done: bool


class InARow(State):  # noqa: D101
    in_a_row: Count


class ZeroGradient(State):  # noqa: D101
    in_a_row: Count
    zeros: dict[str, Count]
    alive: tuple[Count, dict[str, Count], list[str]] | None = None
    said: tuple[Count, int] | None = None


class UpdateRatio(State):  # noqa: D101
    above: Count
    below: Count


class PoisonedMoments(State):  # noqa: D101
    moments: dict[str, Sizes]
    norms: dict[str, Sizes]
    peak: Size
    peaks: Sizes
    jumped_in_a_row: Count
    clean: Step | None


class SaturatedUnits(State):  # noqa: D101
    runs: Runs
    first: float | None


class ConstantPrediction(State):  # noqa: D101
    first: float | None
    losses: Losses
    peak: float
    levels: Losses
    seen: Count
    done: bool


class DamagedState(State):  # noqa: D101
    clean: Step
    gradient: Size
    in_a_row: dict[str, Count]


class LostMoments(State):  # noqa: D101
    looks: list[tuple[Step, dict[str, Size]]]


class EarlyDivergence(State):  # noqa: D101
    first: float | None
    seen: Count
    since: Step | None
    in_a_row: Count
    asked: bool


class EntropyCollapse(State):  # noqa: D101
    first: dict[str, Losses]
    recent: dict[str, Losses]
    told: list[str]


class MetricBounds(State):  # noqa: D101
    outside: list[str]


class ShortWarmup(State):  # noqa: D101
    first: Size | None
    last: Size
    steps: Count
    done: bool


class ClipRate(State):  # noqa: D101
    steps: Annotated[int, Field(ge=0, lt=100)]
    clipped: Count
    far: Count
    blocks: Count
    recent: Steps
    rest: Count
    warned: bool


class LearningRateBounds(State):  # noqa: D101
    lr: Size | None
    before: Size | None
    same: Count
    told: dict[str, bool]


class LearningRateCreep(State):  # noqa: D101
    rates: tuple[Size, Size, Size | None]
    steps: tuple[Count, int]


class LearningRateJump(State):  # noqa: D101
    rates: tuple[Size, Size, Size, Size]
    recent: Sizes
    counts: tuple[Count, Count, Count]


class LossScale(State):  # noqa: D101
    steps: Count
    scale: Size | None
    cuts: Steps
    until: Step


DETECTORS: dict[str, Any] = {
    "attention-logit-growth": Growth,
    "buffer-jump": BufferJump,
    "clip-rate": ClipRate,
    "constant-prediction": ConstantPrediction,
    "damaged-state": DamagedState,
    "lost-moments": LostMoments,
    "dead-units": Runs,
    "early-divergence": EarlyDivergence,
    "embedding-growth": Growth,
    "entropy-collapse": EntropyCollapse,
    "flat-reward": dict[str, Losses],
    "gradient-spike": GradientSpike,
    "growing-gradient": GrowingGradient,
    "input-scale": InputScale,
    "kl-blow-up": dict[str, Level],
    "learning-rate-bounds": LearningRateBounds,
    "learning-rate-creep": LearningRateCreep,
    "learning-rate-jump": LearningRateJump,
    "loss-scale": LossScale,
    "loss-spike": Level,
    "metric-bounds": MetricBounds,
    "no-learning": NoLearning,
    "non-finite": NonFinite,
    "not-healing": NotHealing,
    "odd-replica": Nothing,
    "oscillation": Oscillation,
    "poisoned-moments": PoisonedMoments,
    "rms-surprise": dict[str, Sizes],
    "same-batch": SameBatch,
    "saturated-units": SaturatedUnits,
    "short-warmup": ShortWarmup,
    "slow-divergence": SlowDivergence,
    "suspicious-perfection": Perfection,
    "update-ratio": UpdateRatio,
    "vanishing-gradient": InARow,
    "weight-jump": WeightJump,
    "worse-than-best": WorseThanBest,
    "zero-gradient": ZeroGradient,
}
