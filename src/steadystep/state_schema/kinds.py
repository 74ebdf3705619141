"""The kinds of values a guard's state is made of, and the states that several parts have in common."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Step = Annotated[int, Field(ge=-1)]
"""-1 stands for "never"."""
Losses = Annotated[list[float], Field(max_length=4096)]
Sizes = Annotated[list[Size], Field(max_length=4096)]
Steps = Annotated[list[Count], Field(max_length=4096)]


class State(BaseModel):
    """Strict: text that looks like a number is none, `true` is none either, and all numbers are finite.

    Keys beyond these are compared with what the part itself saves, so that a part may come to remember more.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class Level(State):
    """Of `stats.Level`."""

    values: Losses
    rejected: Losses
    since: int
    usual: tuple[float, Size] | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.usual is None) == bool(self.values):
            raise ValueError("its level belongs to other values")
        return self


class Tail(State):
    """Of `stats.Tail`."""

    seen: Count
    excess: Annotated[list[tuple[Count, Size]], Field(max_length=64)]


class Sum(State):
    """Of `stats.Cusum`."""

    value: Size
    since: int


class Rise(State):
    """Of `PlannedRise`."""

    low: Size | None
    before: Size | None
    rates: tuple[Size, Size, Size, Size]
    rested: Count


class Runs(State):
    """Of `Runs`."""

    counts: dict[str, Count]
    said: list[str]


class Growth(State):
    """Of `Growth`."""

    first: dict[str, Sizes]
    last: dict[str, Sizes]
    runs: Runs


class Nothing(State):
    """Of a part that remembers nothing."""
