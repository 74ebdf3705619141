"""What `check` says: hits in the wiring, items of the checklist, and both together as a report."""

from dataclasses import dataclass
from typing import Any, Literal, final

from steadystep._utils.checklist import ChecklistItem
from steadystep.lint.causes import CAUSES

HitSeverity = Literal["error", "warning", "advice"]
ReportKind = Literal["script", "config", "run"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One fault at one place."""

    code: str
    """Code of the rule."""
    line: int
    """Line in the script, from 1."""
    column: int
    """Column in the line, in characters from 0."""
    message: str
    """What is wrong here."""
    severity: HitSeverity
    """Severity of the rule."""
    why: str
    """Why it matters, in one sentence."""
    diff: str = ""
    """The fix as a unified diff; empty where it cannot be exact."""
    snippet: str = ""
    """What it should look like, where there is no diff."""
    end_line: int = 0
    """Last line of the faulty expression; 0 for a loop or a function, where only the first line is meant."""
    end_column: int = 0
    """Column behind its last character."""

    @property
    def cause(self) -> str:
        """The cause that `steadystep diagnose` gives a run with this fault; empty where there is none of its own."""
        return CAUSES.get(self.code, "")

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"cause": self.cause}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was found at one path."""

    path: str
    """The path."""
    kind: ReportKind
    """What it is: a script, a config or a run."""
    hits: tuple[Hit, ...] = ()
    """Faults, in order."""
    items: tuple[ChecklistItem, ...] = ()
    """The checklist."""
    source: tuple[str, ...] = ()
    """Lines of a script or config, to show them."""
    notes: tuple[str, ...] = ()
    """What could not be checked."""

    @property
    def faults(self) -> tuple[Hit, ...]:
        """The hits that count; advice does not."""
        return tuple(hit for hit in self.hits if hit.severity != "advice")

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "hits": [hit.as_dict() for hit in self.hits],
            "checklist": [item.as_dict() for item in self.items],
            "notes": list(self.notes),
        }
