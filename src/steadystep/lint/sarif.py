"""Reports as SARIF 2.1.0, the format that code scanning services and editors read.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from steadystep.lint.catalog import RULES, LintRule
from steadystep.lint.causes import CAUSES
from steadystep.lint.patch import Replacement
from steadystep.lint.repairs import edits, fix_state
from steadystep.lint.report import Hit, HitSeverity, Report
from steadystep.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
CONFIG_RULE = LintRule("SS001", "rejected-setting", "error", "a file with such a setting is rejected")
_LEVELS: dict[HitSeverity, str] = {"error": "error", "warning": "warning", "advice": "note"}


def as_sarif(reports: Iterable[Report], problems: Sequence[str] = ()) -> dict[str, Any]:
    """Return one SARIF log with one run: the rules, a result for each hit, and what could not be read.

    Args:
        reports: what was checked.
        problems: messages about files that could not be read.
    """
    rules = [*RULES.values(), CONFIG_RULE]
    places = {rule.code: place for place, rule in enumerate(rules)}
    notifications = [{"level": "error", "message": {"text": problem}} for problem in problems]
    invocation = {"executionSuccessful": not problems, "toolExecutionNotifications": notifications}
    driver = {"name": "steadystep", "version": __version__, "rules": [_rule(rule) for rule in rules]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [invocation],
        "results": [_result(hit, report, places) for report in reports for hit in report.hits],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: LintRule) -> dict[str, Any]:
    why = f"{rule.why[:1].upper()}{rule.why[1:]}."
    cause = CAUSES.get(rule.code)
    shown = f" `steadystep diagnose` calls the cause of such a run `{cause}`." if cause else ""
    silence = f"# steadystep: ignore[{rule.code}]"
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": f"{rule.code} {rule.name}"},
        "fullDescription": {"text": why},
        "help": {
            "text": f"{why}{shown.replace('`', '')} Suppress it on a line with: {silence}",
            "markdown": f"{why}{shown}\n\nSuppress it on a line with `{silence}`.",
        },
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": ["training"], **({"cause": cause} if cause else {})},
    }


def _result(hit: Hit, report: Report, places: dict[str, int]) -> dict[str, Any]:
    artifact = {"uri": uri_of(report.path)}
    place: dict[str, Any] = {"artifactLocation": artifact}
    if hit.line > 0:
        place["region"] = _region(hit, report.source)
    state = fix_state(hit, "\n".join(report.source) + "\n")
    result: dict[str, Any] = {
        "ruleId": hit.code,
        "ruleIndex": places.get(hit.code, -1),
        "level": _LEVELS[hit.severity],
        "message": {"text": f"{_ended(hit.message)} Why: {_ended(hit.why)}"},
        "locations": [{"physicalLocation": place}],
        "properties": {"fix": state, **({"cause": hit.cause} if hit.cause else {})},
    }
    if state != "none":
        changes = [_replacement(change, report.source) for change in edits(hit)]
        result["fixes"] = [
            {
                "description": {"text": f"{RULES[hit.code].name}: {state} fix"},
                "artifactChanges": [{"artifactLocation": artifact, "replacements": changes}],
            }
        ]
    return result


def _ended(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def uri_of(path: str) -> str:
    """Return a path as a URI: relative to the working directory where it is below it, as a `file:` URI elsewhere."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    if relative.startswith("..") or os.path.isabs(relative):
        return "file://" + quote(os.fsencode(Path(absolute).as_posix()))
    return quote(os.fsencode(Path(relative).as_posix()))


def _region(hit: Hit, source: Sequence[str]) -> dict[str, int]:
    """Lines and columns from 1; a hit without an end reaches to the end of its line."""
    width = len(source[hit.line - 1].rstrip()) if hit.line <= len(source) else 0
    region = {"startLine": hit.line, "startColumn": hit.column + 1, "endLine": hit.line, "endColumn": width + 1}
    if hit.end_line >= hit.line and (hit.end_line, hit.end_column) > (hit.line, hit.column):
        region |= {"endLine": hit.end_line, "endColumn": hit.end_column + 1}
    region["endColumn"] = max(region["endColumn"], 1)
    if region["endLine"] == hit.line and region["endColumn"] < region["startColumn"]:
        region["endColumn"] = region["startColumn"]
    return region


def _replacement(change: Replacement, source: Sequence[str]) -> dict[str, Any]:
    """Whole lines, each with the break behind it; at the end of the file, with the break in front of it."""
    end, text = change.first + len(change.old), "".join(f"{line}\n" for line in change.new)
    region = {"startLine": change.first, "startColumn": 1, "endLine": end, "endColumn": 1}
    if end > len(source):
        region |= {"endLine": max(len(source), 1), "endColumn": len(source[-1]) + 1 if source else 1}
        text = "\n".join(change.new)
        if change.first > 1:
            region |= {"startLine": change.first - 1, "startColumn": len(source[change.first - 2]) + 1}
            text = "".join(f"\n{line}" for line in change.new)
    return {"deletedRegion": region, "insertedContent": {"text": text}}


def as_github(reports: Iterable[Report], problems: Sequence[str] = ()) -> str:
    """Return workflow commands, one line each, which GitHub Actions shows next to the code."""
    lines = []
    for report in reports:
        for hit in report.hits:
            level = {"error": "error", "warning": "warning", "advice": "notice"}[hit.severity]
            region = _region(hit, report.source)
            named = {"file": Path(os.path.relpath(report.path)).as_posix(), "line": hit.line, "col": hit.column + 1}
            named |= {"endLine": region["endLine"], "endColumn": region["endColumn"], "title": hit.code}
            options = ",".join(f"{key}={_escaped(str(value), ':,')}" for key, value in named.items())
            lines.append(f"::{level} {options}::{_escaped(f'{hit.message} ({hit.why})')}\n")
    return "".join([*lines, *(f"::error::{_escaped(problem)}\n" for problem in problems)])


def _escaped(text: str, special: str = "") -> str:
    for letter in "%\r\n" + special:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
