"""Reports on a terminal: the place, the source line with a caret, why, and the fix."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from steadystep._utils.checklist import ChecklistItem, ItemState
from steadystep.lint.fix import Fixed
from steadystep.lint.report import Hit, HitSeverity, Report

_COLOURS: dict[HitSeverity, str] = {"error": "red", "warning": "yellow", "advice": "cyan"}
_ITEM_COLOURS: dict[ItemState, str] = {
    "present": "green",
    "partial": "yellow",
    "absent": "red",
    "not-needed": "dim",
    "unknown": "dim",
}
_SHORT = 16  # lines of a diff that are shown unasked


def show(
    report: Report,
    console: Console,
    *,
    diff: bool | None,
    checklist: bool,
    reasons: Mapping[Hit, str] = MappingProxyType({}),
) -> None:
    """Hits first, then the checklist. `diff` None shows short ones; `reasons` why a fix was not applied."""
    for hit in report.hits:
        _hit(hit, report, console, diff=diff, reason=reasons.get(hit, ""))
    if checklist and report.items:
        _checklist(report, console)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))


def show_fixes(fixed: Fixed, console: Console, *, written: bool) -> None:
    """What was fixed in one file, a line for each hit, and all of it as a diff."""
    path = fixed.report.path
    for hit in fixed.applied:
        word = "fixed" if written else "would fix"
        head = Text.assemble((f"{word} ", "bold green"), (f"{hit.code} ", "bold"), f"{path}:{hit.line}: {hit.message}")
        console.print(head, soft_wrap=True)
    _diff(fixed.diff.split("\n"), console, indent=0)
    console.print()


def _diff(lines: Sequence[str], console: Console, *, indent: int) -> None:
    for line in lines:
        style = {"+": "green", "-": "red", "@": "dim cyan"}.get(line[:1], "default")
        console.print(Text(" " * indent + line, style=style), soft_wrap=True)


def _hit(hit: Hit, report: Report, console: Console, *, diff: bool | None, reason: str) -> None:
    colour = _COLOURS[hit.severity]
    head = Text()
    head.append(f"{hit.code} ", style=f"bold {colour}")
    head.append(hit.message, style="bold")
    console.print(head, soft_wrap=True)
    width = len(str(hit.line))
    place = Text(" " * width + "--> ", style="blue")
    place.append(f"{report.path}:{hit.line}:{hit.column + 1}", style="default")
    console.print(place, soft_wrap=True)
    if 0 < hit.line <= len(report.source):
        line = report.source[hit.line - 1]
        code = line.strip()
        begin = max(hit.column - (len(line) - len(line.lstrip())), 0)
        ends = hit.end_column - hit.column if hit.end_line == hit.line else len(code) - begin
        caret = " " * cell_len(code[:begin]) + "^" * max(min(cell_len(code[begin : begin + ends]), 60), 1)
        for gutter, text, style in ((str(hit.line), code, "default"), (" " * width, caret, colour)):
            console.print(Text.assemble((f"{gutter} | ", "blue"), (text, style)), soft_wrap=True)
    console.print(Text.assemble((" " * width + " = ", "blue"), ("why: ", "bold"), hit.why), soft_wrap=True)
    _fix(hit, console, width, diff=diff)
    if reason:
        console.print(Text.assemble((" " * width + " = ", "blue"), ("not applied: ", "bold"), reason), soft_wrap=True)
    console.print()


def _fix(hit: Hit, console: Console, width: int, *, diff: bool | None) -> None:
    lines = hit.diff.split("\n")[2:] if hit.diff else []
    if diff is False:
        return
    if lines and (diff or len(lines) <= _SHORT):
        console.print(Text.assemble((" " * width + " = ", "blue"), ("fix:", "bold")))
        _diff(lines, console, indent=width + 3)
    elif hit.snippet:
        console.print(Text.assemble((" " * width + " = ", "blue"), ("fix:", "bold")))
        shown = Syntax(hit.snippet, "python", theme="ansi_dark", background_color="default")
        console.print(Padding(shown, (0, 0, 0, width + 4)))
    elif lines:
        console.print(Text.assemble((" " * width + " = ", "blue"), ("fix: ", "bold"), f"{len(lines)} lines; --diff"))


def _checklist(report: Report, console: Console) -> None:
    console.print(Text(f"checklist  {report.path}", style="bold"), soft_wrap=True)
    wide = max(len(item.name) for item in report.items)
    for item in report.items:
        _item(item, console, wide)
    console.print()


def _item(item: ChecklistItem, console: Console, wide: int) -> None:
    place = f":{item.line}" if item.line else ""
    row = Text.assemble(
        (f"  {item.mark} ", _ITEM_COLOURS[item.state]),
        item.name.ljust(wide),
        (place.rjust(6), "blue"),
        f"  {item.evidence}",
    )
    console.print(row, soft_wrap=True)
    if item.fix and item.state in ("absent", "partial"):
        console.print(Text(" " * (wide + 12) + item.fix, style="dim"), soft_wrap=True)
