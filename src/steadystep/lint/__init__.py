"""The checklist and the linter behind `steadystep check`. Scripts are parsed, never run."""

from steadystep._utils.checklist import ChecklistItem
from steadystep.lint.catalog import RULES, LintRule
from steadystep.lint.check import check_path, check_script
from steadystep.lint.report import Hit, Report

__all__ = ["RULES", "ChecklistItem", "Hit", "LintRule", "Report", "check_path", "check_script"]
