"""What a path is, and who checks it: a script by every rule, a config or a run by a module of its own."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from steadystep._utils.checklist import ChecklistItem
from steadystep._utils.text import must_end
from steadystep.errors import ConfigError
from steadystep.lint.checklist import script_checklist
from steadystep.lint.context import Context
from steadystep.lint.encoding import script_of
from steadystep.lint.ignore import Ignored
from steadystep.lint.project import Linked, link, project_of
from steadystep.lint.report import Hit, Report
from steadystep.lint.rules import ALL_RULES
from steadystep.lint.script import Script

_ACROSS = frozenset({"SS303", "SS304", "SS305"})
"""What only shows when a network of one file meets a loss of another."""
_LOG = "run.jsonl"
_TEST_FOLDERS = frozenset({"test", "tests", "testing", "unit_tests", "unittests"})
_TEST_FILE = re.compile(r"^test_.*\.py$|_test\.py$")
_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})


def check_script(text: str, path: str = "script.py", *, project: Path | None = None) -> Report:
    """Check the text of a script, without running it.

    Args:
        text: the script.
        path: its name in the report; with `project` also where its imports begin.
        project: folder of a project. Definitions that the script imports from files below it are followed.

    Raises:
        ConfigError: it is not Python, or nested too deeply.
    """
    try:
        return _check(text, path, link(text, Path(path), project) if project is not None else Linked())
    except RecursionError:
        raise ConfigError(f"{path}: cannot be parsed: nested too deeply") from None


def _check(text: str, path: str, linked: Linked) -> Report:
    script = Script(text, path, linked)
    context = Context(script)
    ignored = Ignored(text)
    seen: dict[tuple[str, int], Hit] = {}
    for rule in ALL_RULES:
        for hit in _here(script, rule(context)):
            if not ignored.covers(hit.code, hit.line, _end(script, hit.line)):
                seen.setdefault((hit.code, hit.line), hit)
    hits = sorted((_in_characters(hit, script.lines) for hit in seen.values()), key=lambda h: (h.line, h.code))
    return Report(
        path=path,
        kind="script",
        hits=tuple(hits),
        items=tuple(_without_far_line(item, script.own) for item in script_checklist(context)),
        source=tuple(script.lines[: script.own]),
    )


def _in_characters(hit: Hit, lines: Sequence[str]) -> Hit:
    """The hit with its columns in characters: a syntax tree counts bytes of UTF-8."""

    def column(line: int, offset: int) -> int:
        text = lines[line - 1] if 0 < line <= len(lines) else ""
        return offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))

    return replace(hit, column=column(hit.line, hit.column), end_column=column(hit.end_line, hit.end_column))


def _here(script: Script, hits: Iterator[Hit]) -> Iterator[Hit]:
    """The hits in the script, and where it imports a network that was made for another loss.

    What is wrong in another file alone is reported there.
    """
    for hit in hits:
        if hit.line <= script.own:
            yield hit
        elif hit.code in _ACROSS:
            part = max((s for s in script.linked.segments if s.first <= hit.line), key=lambda s: s.first)
            place = f"{Path(part.path).name}:{hit.line - part.first + part.begins}"
            yield replace(
                hit,
                line=part.brought_by,
                end_line=part.brought_by,
                column=0,
                end_column=0,
                message=f"{hit.message} ({place})",
                diff="",
            )


def _without_far_line(item: ChecklistItem, own: int) -> ChecklistItem:
    return replace(item, line=None) if item.line is not None and item.line > own else item


def _is_test(text: str, path: Path) -> bool:
    """A file of a test suite: it steps, clips and breaks things in ways that no training does."""
    if any(part in _TEST_FOLDERS for part in path.parts[:-1]) or path.name == "conftest.py":
        return True
    return bool(_TEST_FILE.search(path.name)) and ("def test_" in text or "unittest" in text)


def _lowered(report: Report) -> Report:
    return replace(report, hits=tuple(replace(hit, severity="advice") for hit in report.hits))


def _end(script: Script, line: int) -> int:
    """The last line of the shortest statement that begins there."""
    ends = script.once("ends of lines", lambda: _ends(script)).get(line, [])
    return max(ends, default=line) if len(ends) < 200 else line


def _ends(script: Script) -> dict[int, list[int]]:
    """Where what begins in a line ends."""
    ends: dict[int, list[int]] = {}
    for node in script.nodes:
        if hasattr(node, "end_lineno"):
            line = int(getattr(node, "lineno", 0))
            ends.setdefault(line, []).append(node.end_lineno or line)
    return ends


def check_path(path: Path) -> Iterator[Report]:
    """Yield one report for a script, a config or a run at `path`; for a folder, one per script.

    Raises:
        ConfigError: it is none of them, or cannot be read. In a folder the other scripts come first, and then one error
            for all that could not be read, a line for each.
    """
    must_end(path)
    if path.is_dir() and (path / _LOG).exists():
        yield _run(path)
    elif path.is_dir():
        scripts = sorted(p for p in path.rglob("*.py") if not _hidden(p.relative_to(path)) and not p.is_dir())
        if not scripts:
            raise ConfigError(f"{path}: contains neither a run ({_LOG}) nor a Python file")
        problems: list[str] = []
        for script in scripts:
            try:
                report = _script(script, project_of(path))
                text = "\n".join(report.source)
                yield _lowered(report) if _is_test(text, script.relative_to(path)) else report
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
    elif path.suffix in (".yaml", ".yml"):
        from steadystep.lint.configs import check_config

        yield check_config(path)
    elif path.suffix == ".jsonl":
        yield _run(path)
    elif path.suffix in (".py", ""):
        yield _script(path, project_of(path))
    elif path.suffix == ".ipynb":
        raise ConfigError(f"{path}: a notebook: convert it first with jupyter nbconvert --to script")
    else:
        raise ConfigError(f"{path}: expected a training script (.py), a config (.yaml) or a run folder")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in _SKIPPED for part in path.parts)


def _run(path: Path) -> Report:
    from steadystep.lint.runs import check_run

    return check_run(path)


def _script(path: Path, project: Path) -> Report:
    return check_script(script_of(path), str(path), project=project)
