"""A doctor for anyone's logs: `open_run` reads them, `diagnose` says what their curves show. No torch needed."""

from steadystep.curves.diagnosing import diagnose
from steadystep.curves.opening import find_runs, open_run
from steadystep.curves.reading import Pattern, PlannedAction, Reading

__all__ = ["Pattern", "PlannedAction", "Reading", "diagnose", "find_runs", "open_run"]
