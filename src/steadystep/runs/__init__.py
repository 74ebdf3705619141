"""Reads any run, ours or another tool's, and diagnoses its curves. No torch needed."""

from typing import TYPE_CHECKING

from steadystep._utils import lazy_names

if TYPE_CHECKING:
    from steadystep.runs.comparison import Comparison, compare
    from steadystep.runs.diagnosis import diagnose
    from steadystep.runs.open import find_runs, open_run, open_runs
    from steadystep.runs.reading import Pattern, PlannedAction, Reading

__all__ = [
    "Comparison",
    "Pattern",
    "PlannedAction",
    "Reading",
    "compare",
    "diagnose",
    "find_runs",
    "open_run",
    "open_runs",
]

__getattr__ = lazy_names(
    __name__,
    {
        "comparison": ("Comparison", "compare"),
        "diagnosis": ("diagnose",),
        "open": ("find_runs", "open_run", "open_runs"),
        "reading": ("Pattern", "PlannedAction", "Reading"),
    },
)
