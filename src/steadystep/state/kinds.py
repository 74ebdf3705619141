"""The kinds of values a guard's state is made of, and the states that several parts have in common."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
WholeNumber = Annotated[int, Field(ge=0)]
StepNumber = Annotated[int, Field(ge=-1)]
"""-1 stands for "never"."""
Losses = Annotated[list[float], Field(max_length=4096)]
Sizes = Annotated[list[Size], Field(max_length=4096)]
Steps = Annotated[list[WholeNumber], Field(max_length=4096)]


class PartState(BaseModel):
    """Strict: text that looks like a number is none, `true` is none either, and all numbers are finite.

    Keys beyond these are compared with what the part itself saves, so that a part may come to remember more.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class LevelState(PartState):
    """Of `stats.Level`."""

    values: Losses
    rejected: Losses
    since: int
    usual: tuple[float, Size] | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.usual is None) == bool(self.values):
            raise ValueError("its level does not belong to its values")
        return self


class TailState(PartState):
    """Of `stats.Tail`."""

    seen: WholeNumber
    excess: Annotated[list[tuple[WholeNumber, Size]], Field(max_length=64)]


class SumState(PartState):
    """Of `stats.Cusum`."""

    value: Size
    since: int


class RiseState(PartState):
    """Of `PlannedRise`."""

    low: Size | None
    before: Size | None
    rates: tuple[Size, Size, Size, Size]
    rested: WholeNumber


class RunsState(PartState):
    """Of `Runs`."""

    counts: dict[str, WholeNumber]
    said: list[str]


class GrowthState(PartState):
    """Of `Growth`."""

    first: dict[str, Sizes]
    last: dict[str, Sizes]
    runs: RunsState


class NothingState(PartState):
    """Of a part that remembers nothing."""
