"""What the state of each detector of a policy looks like, by the detector's name."""

from typing import Annotated, Any

from pydantic import Field

from steadystep.state import LevelState, Losses, PartState, Size, StepNumber, WholeNumber


class FitState(PartState):  # noqa: D101 - each is named after its detector
    count: WholeNumber
    means: Annotated[list[float], Field(min_length=2, max_length=2)]
    sums: Annotated[list[float], Field(min_length=3, max_length=3)]


class EntropyCollapseState(PartState):  # noqa: D101
    first: dict[str, Losses]
    recent: dict[str, Losses]
    told: list[str]
    fit: FitState | None = None


class MetricBoundsState(PartState):  # noqa: D101
    outside: list[str]


class ExtremeState(PartState):
    """One metric of `RatioExplosion` or `PolicyMismatch`."""

    level: LevelState
    largest: Size
    in_a_row: WholeNumber


class RatioExplosionState(PartState):  # noqa: D101
    ratio_max: ExtremeState
    kl_old: ExtremeState
    clip_fraction: ExtremeState


class MismatchParts(PartState):
    """The metrics of `PolicyMismatch`."""

    mismatch: ExtremeState
    mismatch_tail: ExtremeState
    mismatch_kl: ExtremeState
    lost_samples: ExtremeState


class PolicyMismatchState(PartState):  # noqa: D101
    parts: MismatchParts
    told: list[str]


class DeadGroupsState(PartState):  # noqa: D101
    shares: Losses
    rewards: Annotated[list[Losses], Field(min_length=2, max_length=2)]
    told: bool
    spreads: Losses = Field(default_factory=list)
    gone: WholeNumber = 0


class BadAdvantagesState(PartState):  # noqa: D101
    agreements: Losses
    against: WholeNumber
    peak: ExtremeState


class FallState(PartState):
    """One series of `RewardCollapse`."""

    last: float | None
    block: Losses
    blocks: Losses
    differences: Losses
    levels: tuple[float, float, StepNumber] | None
    told: Annotated[int, Field(ge=0, le=2)]


class RewardCollapseState(PartState):  # noqa: D101
    reward: FallState
    held_out_reward: FallState


class RewardHackingState(PartState):  # noqa: D101
    rewards: Losses
    pairs: list[Annotated[Losses, Field(min_length=3, max_length=3)]]
    lengths: Annotated[list[Losses], Field(min_length=2, max_length=2)]
    told: list[str]


class ValueDivergenceState(PartState):  # noqa: D101
    kept: dict[str, Losses]
    told: bool


POLICY_DETECTORS: dict[str, Any] = {
    "bad-advantages": BadAdvantagesState,
    "dead-groups": DeadGroupsState,
    "entropy-collapse": EntropyCollapseState,
    "flat-reward": dict[str, Losses],
    "kl-blow-up": dict[str, LevelState],
    "metric-bounds": MetricBoundsState,
    "policy-mismatch": PolicyMismatchState,
    "ratio-explosion": RatioExplosionState,
    "reward-collapse": RewardCollapseState,
    "reward-hacking": RewardHackingState,
    "value-divergence": ValueDivergenceState,
}
