"""What `check` says: hits in the wiring, items of the checklist, and both together as a report."""

from dataclasses import dataclass
from typing import Any, Literal, final

from steadystep._utils.checklist import ChecklistItem

HitSeverity = Literal["error", "warning", "advice"]
ReportKind = Literal["script", "config", "run"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One fault at one place."""

    code: str
    line: int
    column: int
    message: str
    severity: HitSeverity
    why: str
    """Why it matters, in one sentence."""
    diff: str = ""
    """The fix as a unified diff; empty where it cannot be exact."""
    snippet: str = ""
    """What it should look like, where there is no diff."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything about one path."""

    path: str
    kind: ReportKind
    hits: tuple[Hit, ...] = ()
    items: tuple[ChecklistItem, ...] = ()
    source: tuple[str, ...] = ()
    """The lines of a script or a config, for showing them."""
    notes: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Hit, ...]:
        """The hits that count: advice does not."""
        return tuple(hit for hit in self.hits if hit.severity != "advice")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "hits": [hit.as_dict() for hit in self.hits],
            "checklist": [item.as_dict() for item in self.items],
            "notes": list(self.notes),
        }
