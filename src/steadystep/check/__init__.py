"""The checklist and the wiring linter behind `steadystep check`. Scripts are read as syntax trees, never run."""

from steadystep.check.catalog import RULES, Rule
from steadystep.check.hit import Hit, Item, Report
from steadystep.check.paths import check_path
from steadystep.check.scripts import check_script

__all__ = ["RULES", "Hit", "Item", "Report", "Rule", "check_path", "check_script"]
