"""What the states of a guard's other parts look like, by the name under which they are saved."""

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from steadystep.records import BatchStats, InputStats, OutputStats, Plan, Probe, WeightStats
from steadystep.state import Losses, NothingState, PartState, Size, Sizes, StepNumber, Steps, WholeNumber

_PROBED = ("weight_rms", "update_rms", "second_moments", "surprises", "zero_shares")
_ALIGNED = dict.fromkeys(_PROBED, "names") | {
    "dead": "modules",
    "saturated": "modules",
    "row_norms": "tables",
    "logit_bounds": "attentions",
}


class ScalerState(PartState):
    """Of torch's GradScaler."""

    scale: Annotated[float, Field(gt=0)]
    growth_factor: Annotated[float, Field(gt=1)]
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]
    growth_interval: Annotated[int, Field(ge=1)]
    growth_tracker: Annotated[int, Field(ge=0, alias="_growth_tracker")]


class AccumulationState(PartState):  # noqa: D101 - each is named after its part
    largest_weight: Size


class MemoryState(PartState):  # noqa: D101
    size: Annotated[int, Field(ge=1)] | None
    retries: WholeNumber
    batches: WholeNumber
    calm: WholeNumber = 0
    wait: Annotated[int, Field(ge=1)] = 64
    grown: bool = False


class ReplayBufferState(PartState):  # noqa: D101
    open: bool


class PlateauState(PartState):  # noqa: D101
    multiplier: Annotated[float, Field(ge=0)]
    best: float | None
    num_bad: WholeNumber
    cooldown_left: WholeNumber


class CeilingState(PartState):  # noqa: D101
    lr: Annotated[float, Field(gt=0)] | None
    rates: tuple[Size, Size, Size]
    hold: tuple[WholeNumber, WholeNumber, WholeNumber]
    rewarm: tuple[WholeNumber, WholeNumber]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rewarm[0] > self.rewarm[1]:
            raise ValueError("more of the rewarm is left than its length")
        if self.lr is not None and not self.hold[2]:
            raise ValueError("a limit that is never lifted")
        return self


class LearningRateState(PartState):  # noqa: D101
    bases: list[Size]
    rates: list[Size]
    plateau: PlateauState | None
    ceiling: CeilingState
    start: Annotated[float, Field(gt=0)] | None = None


class EpisodeState(PartState):  # noqa: D101
    first_sign: StepNumber | None
    last_sign: StepNumber
    suspected: tuple[StepNumber | None, StepNumber]
    foretold: StepNumber | None


_Numbers = Annotated[list[WholeNumber], Field(max_length=4096)]
_Quarantined = tuple[StepNumber, Annotated[str, Field(max_length=64)], WholeNumber | None, _Numbers]


class BudgetState(PartState):  # noqa: D101
    skips_in_a_row: WholeNumber
    refused_in_a_row: WholeNumber
    skips: Steps
    rollbacks: Annotated[list[tuple[WholeNumber, StepNumber]], Field(max_length=4096)]
    raised: Steps = Field(default_factory=list)
    quarantined: Annotated[list[_Quarantined], Field(max_length=4096)] = Field(default_factory=list)
    episode: EpisodeState


class OccurrencesState(PartState):  # noqa: D101
    count: Annotated[int, Field(ge=1)]
    first: StepNumber
    last: StepNumber
    worst: float | None
    what: str
    names: dict[str, WholeNumber]


class TraceState(PartState):  # noqa: D101
    every: Annotated[int, Field(ge=1)]
    seen: WholeNumber
    steps: Annotated[list[WholeNumber], Field(max_length=511)]
    losses: Losses
    norms: Sizes
    lrs: Sizes
    first: Annotated[list[float], Field(max_length=8)]
    first_norms: Annotated[list[Size], Field(max_length=16)]
    peak: float | None
    peak_step: StepNumber

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.steps) == len(self.losses) == len(self.norms) == len(self.lrs):
            raise ValueError("its columns have different lengths")
        if self.every & (self.every - 1):
            raise ValueError("its points are a power of two apart")
        if bool(self.steps) != bool(self.first) or bool(self.steps) != bool(self.first_norms):
            raise ValueError("its first points are missing")
        if bool(self.steps) == (self.peak is None):
            raise ValueError("its highest loss is missing")
        return self


class LayersState(PartState):  # noqa: D101
    stride: Annotated[int, Field(ge=1)]
    until: int
    ratios: Annotated[list[Size], Field(max_length=127)]
    highest: Size
    first: str | None
    last: str | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for text in (self.first, self.last):
            check_probe(text)
        return self


class OpinionState(PartState):  # noqa: D101
    next: Annotated[int, Field(ge=1)]
    last: str
    told: list[str]


class InterventionsState(PartState):  # noqa: D101
    plan: str
    actions: list[str]

    @model_validator(mode="after")
    def _check(self) -> Self:
        _record(Plan, self.plan)
        return self


class OutputTrailState(PartState):  # noqa: D101
    count: WholeNumber
    first: str | None
    last: str | None
    matches: dict[str, WholeNumber]
    simplex: tuple[WholeNumber, WholeNumber]
    evaluating: WholeNumber
    range: tuple[float, float] | None
    pairs: list[tuple[float, float]] = Field(default_factory=list)
    wrong: dict[str, WholeNumber] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for text in (self.first, self.last):
            if text is not None:
                _record(OutputStats, text)
        return self


class MeasuredState(PartState):  # noqa: D101
    batch: str | None
    early: str | None
    initial: str | None
    outputs: OutputTrailState
    touched: list[str]
    updated: list[str]
    rewarded: bool
    loop: (
        tuple[WholeNumber, WholeNumber, WholeNumber] | tuple[WholeNumber, WholeNumber, WholeNumber, WholeNumber] | None
    ) = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for text in (self.batch, self.early):
            if text is not None:
                _record(BatchStats, text)
        if self.initial is not None:
            _record(WeightStats, self.initial)
        return self


class RunHistoryState(PartState):  # noqa: D101
    trace: TraceState
    layers: LayersState
    inputs: str | None
    scaled: bool
    incidents: dict[str, OccurrencesState]
    warned: dict[str, OccurrencesState]
    noted: dict[str, OccurrencesState]
    opinion: OpinionState | None = None
    done: dict[str, InterventionsState] = Field(default_factory=dict)
    measured: MeasuredState | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.inputs is not None:
            _record(InputStats, self.inputs)
        return self


class ProbesState(PartState):  # noqa: D101
    record: str | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_probe(self.record)
        return self


class InputsState(PartState):  # noqa: D101
    done: bool


class EarlyStoppingState(PartState):  # noqa: D101
    best: float | None
    since_best: WholeNumber


class SuddenZeroState(PartState):  # noqa: D101
    without: WholeNumber


class RollbackTrialState(PartState):  # noqa: D101
    quiet_until: StepNumber
    told_until: StepNumber


class ZScoreState(PartState):  # noqa: D101
    warmup: Sizes
    mean: Size
    variance: Size
    ready: bool
    held_back_in_a_row: WholeNumber


class PercentileState(PartState):  # noqa: D101
    history: Sizes


class TensorEMAState(PartState):  # noqa: D101
    tensors: dict[str, Any]


PART_SCHEMAS: dict[str, Any] = {
    "precision": ScalerState | NothingState,
    "accumulation": AccumulationState,
    "clip rule": ZScoreState | PercentileState | TensorEMAState,
    "memory": MemoryState,
    "replay buffer": ReplayBufferState,
    "learning_rate": LearningRateState,
    "budget": BudgetState,
    "run history": RunHistoryState,
    "probes": ProbesState,
    "inputs": InputsState,
    "early stopping": EarlyStoppingState,
    "rollback trial": RollbackTrialState,
    "sudden zero": SuddenZeroState,
}


def check_probe(text: str | None) -> None:
    """Refuse a probe whose columns do not belong together."""
    if text is None:
        return
    probe = _record(Probe, text)
    if probe.step < 0:
        raise ValueError("a probe of a negative step")
    for name, names in _ALIGNED.items():
        if len(getattr(probe, name)) not in (0, len(getattr(probe, names))):
            raise ValueError(f"a probe whose {name} do not match its {names}")


def _record(kind: Any, text: str) -> Any:
    try:
        return kind.from_json(text)
    except ValidationError as error:
        raise ValueError(f"not a {kind.__name__} ({error.errors()[0]['msg']})") from None
