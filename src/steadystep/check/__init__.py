"""The checklist and the wiring linter behind `steadystep check`. Scripts are read as syntax trees, never run."""

from steadystep.check.hit import Hit, Item, Report
from steadystep.check.scripts import check_script

__all__ = ["Hit", "Item", "Report", "check_script"]
