"""What the states of a guard's other parts look like, by the name under which they are saved."""

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from steadystep.records import InputStats, Probe
from steadystep.state_schema.kinds import Count, Losses, Nothing, Size, Sizes, State, Step, Steps

_PROBED = ("weight_rms", "update_rms", "second_moments", "surprises", "zero_shares")
_ALIGNED = dict.fromkeys(_PROBED, "names") | {
    "dead": "modules",
    "saturated": "modules",
    "row_norms": "tables",
    "logit_bounds": "attentions",
}


class Scaler(State):
    """Of torch's GradScaler."""

    scale: Annotated[float, Field(gt=0)]
    growth_factor: Annotated[float, Field(gt=1)]
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]
    growth_interval: Annotated[int, Field(ge=1)]
    growth_tracker: Annotated[int, Field(ge=0, alias="_growth_tracker")]


class Accumulation(State):  # noqa: D101 - each is named after its part
    largest_weight: Size


class Memory(State):  # noqa: D101
    size: Annotated[int, Field(ge=1)] | None
    retries: Count
    batches: Count
    calm: Count = 0
    wait: Annotated[int, Field(ge=1)] = 64
    grown: bool = False


class Backlog(State):  # noqa: D101
    open: bool


class Plateau(State):  # noqa: D101
    multiplier: Annotated[float, Field(ge=0)]
    best: float | None
    num_bad: Count
    cooldown_left: Count


class Ceiling(State):  # noqa: D101
    lr: Annotated[float, Field(gt=0)] | None
    rates: tuple[Size, Size, Size]
    hold: tuple[Count, Count, Count]
    rewarm: tuple[Count, Count]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rewarm[0] > self.rewarm[1]:
            raise ValueError("more of the rewarm is left than it is long")
        if self.lr is not None and not self.hold[2]:
            raise ValueError("a limit that is never lifted")
        return self


class LearningRate(State):  # noqa: D101
    bases: list[Size]
    rates: list[Size]
    plateau: Plateau | None
    ceiling: Ceiling
    start: Annotated[float, Field(gt=0)] | None = None


class Episode(State):  # noqa: D101
    first_sign: Step | None
    last_sign: Step
    suspected: tuple[Step | None, Step]
    foretold: Step | None


class Budget(State):  # noqa: D101
    skips_in_a_row: Count
    refused_in_a_row: Count
    skips: Steps
    rollbacks: Annotated[list[tuple[Count, Step]], Field(max_length=4096)]
    raised: Steps = Field(default_factory=list)
    episode: Episode


class Tally(State):  # noqa: D101
    count: Annotated[int, Field(ge=1)]
    first: Step
    last: Step
    worst: float | None
    what: str
    names: dict[str, Count]


class Trace(State):  # noqa: D101
    every: Annotated[int, Field(ge=1)]
    seen: Count
    steps: Annotated[list[Count], Field(max_length=511)]
    losses: Losses
    norms: Sizes
    lrs: Sizes
    first: Annotated[list[float], Field(max_length=8)]
    first_norms: Annotated[list[Size], Field(max_length=16)]
    peak: float | None
    peak_step: Step

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


class Layers(State):  # noqa: D101
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


class Opinion(State):  # noqa: D101
    next: Annotated[int, Field(ge=1)]
    last: str
    told: list[str]


class Casebook(State):  # noqa: D101
    trace: Trace
    layers: Layers
    inputs: str | None
    scaled: bool
    incidents: dict[str, Tally]
    warned: dict[str, Tally]
    noted: dict[str, Tally]
    opinion: Opinion | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.inputs is not None:
            _record(InputStats, self.inputs)
        return self


class Probes(State):  # noqa: D101
    record: str | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_probe(self.record)
        return self


class Inputs(State):  # noqa: D101
    done: bool


class EarlyStopping(State):  # noqa: D101
    best: float | None
    since_best: Count


class SuddenZero(State):  # noqa: D101
    without: Count


class Evidence(State):  # noqa: D101
    quiet_until: Step
    told_until: Step


class ZScore(State):  # noqa: D101
    warmup: Sizes
    mean: Size
    variance: Size
    ready: bool
    held_back_in_a_row: Count


class Percentile(State):  # noqa: D101
    history: Sizes


class TensorEMA(State):  # noqa: D101
    tensors: dict[str, Any]


PARTS: dict[str, Any] = {
    "precision": Scaler | Nothing,
    "accumulation": Accumulation,
    "clip rule": ZScore | Percentile | TensorEMA,
    "memory": Memory,
    "backlog": Backlog,
    "learning_rate": LearningRate,
    "budget": Budget,
    "casebook": Casebook,
    "probes": Probes,
    "inputs": Inputs,
    "early stopping": EarlyStopping,
    "evidence": Evidence,
    "sudden zero": SuddenZero,
}


def check_probe(text: str | None) -> None:
    """Refuse a probe whose columns do not belong together."""
    if text is None:
        return
    probe = _record(Probe, text)
    if probe.step < 0:
        raise ValueError("a probe of a step below zero")
    for name, names in _ALIGNED.items():
        if len(getattr(probe, name)) not in (0, len(getattr(probe, names))):
            raise ValueError(f"a probe with {name} of other {names}")


def _record(kind: Any, text: str) -> Any:
    try:
        return kind.from_json(text)
    except ValidationError as error:
        raise ValueError(f"no {kind.__name__} ({error.errors()[0]['msg']})") from None
