"""What a study is: runs that can be made in any order on any core, and what their results say together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from rich.console import RenderableType

Row = dict[str, Any]
"""One job's arguments and result, ready for JSON."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work that needs nothing from another."""

    key: str
    """The same job has the same key tomorrow: what is stored under it is not made again."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Plain values: they go to another process and into the row."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user asked for."""

    quick: bool = False
    """A few seeds and steps: shows that it works, and no more."""
    seeds: tuple[int, ...] | None = None

    def pick(self, *, full: Iterable[int], quick: Iterable[int]) -> tuple[int, ...]:
        """The seeds that were asked for, or else the study's own."""
        if self.seeds is not None:
            return self.seeds
        return tuple(quick if self.quick else full)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One table of `steadystep bench`. All functions must be importable: they are run in other processes."""

    name: str
    about: str
    """One line for `steadystep bench --help`."""
    jobs: Callable[[Choice], Sequence[Job]]
    run: Callable[[Job], Row]
    """With one torch thread, and warnings silenced; what it returns is stored together with the job's arguments."""
    table: Callable[[Sequence[Row]], RenderableType]
    """For people; must also cope with the rows of a study that was stopped half-way."""
    summary: Callable[[Sequence[Row]], dict[str, Any]]
    """For `--json`."""
    figure: Callable[[Sequence[Row], Path], None] | None = None
    then: Callable[[Choice, Sequence[Row]], Sequence[Job]] | None = None
    """Jobs that follow from the rows so far; asked again until nothing new follows."""
    alone: bool = False
    """It measures time: one job after another, in one process."""
    store: str = ""
    """The name of its results file where it shares one with another study; its own name otherwise."""
    parts: tuple[str, ...] = ()
    """Other modules of lab/bench that its rows depend on, such as "rules"; its own, NAME*.py, need no mention."""
