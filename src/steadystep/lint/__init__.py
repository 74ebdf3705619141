"""The checklist and the wiring linter behind `steadystep check`. Scripts are read as syntax trees, never run."""

from steadystep.lint.catalog import RULES, Rule
from steadystep.lint.hit import Hit, Item, Report
from steadystep.lint.paths import check_path
from steadystep.lint.scripts import check_script

__all__ = ["RULES", "Hit", "Item", "Report", "Rule", "check_path", "check_script"]
