"""What one detector, or one cause, has come to over a run."""

import math
from typing import Any, Self, final

from steadystep.records import Finding

_MOST_NAMES = 64


@final
class Tally:
    """How often, when, how bad, where. Names beyond the first 64 are not counted."""

    __slots__ = ("count", "first", "last", "names", "what", "worst")

    def __init__(self, first: int) -> None:
        self.count = 0
        self.first = self.last = first
        self.worst: float | None = None
        self.what = ""
        """The clause of the worst finding."""
        self.names: dict[str, int] = {}

    def add(self, finding: Finding) -> None:
        """One more finding."""
        self.count += 1
        self.last = finding.step
        if self.worst is None or (math.isfinite(finding.value) and finding.value > self.worst):
            self.what = finding.what
            self.worst = finding.value if math.isfinite(finding.value) else None
        for name in finding.where:
            if name in self.names or len(self.names) < _MOST_NAMES:
                self.names[name] = self.names.get(name, 0) + 1

    @property
    def where(self) -> tuple[str, ...]:
        """The names, the most frequent first."""
        return tuple(sorted(self.names, key=lambda name: -self.names[name]))

    @property
    def when(self) -> str:
        """In words."""
        if self.count == 1:
            return f"at step {self.first}"
        return f"{self.count} times between steps {self.first} and {self.last}"

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "count": self.count,
            "first": self.first,
            "last": self.last,
            "worst": self.worst,
            "what": self.what,
            "names": dict(self.names),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The tally that `state_dict` describes."""
        tally = cls(int(state["first"]))
        tally.count, tally.last = int(state["count"]), int(state["last"])
        tally.worst = None if state["worst"] is None else float(state["worst"])
        tally.what = str(state["what"])
        tally.names = {str(name): int(count) for name, count in state["names"].items()}
        return tally
