"""Checks one training script: every rule, then the checklist."""

from steadystep.errors import ConfigError
from steadystep.lint.checklist import checklist
from steadystep.lint.context import Context
from steadystep.lint.hit import Hit, Report
from steadystep.lint.ignore import Ignored
from steadystep.lint.rules import ALL
from steadystep.lint.script import Script


def check_script(text: str, path: str = "script.py") -> Report:
    """Read, never run.

    Raises:
        ConfigError: it is no Python, or nested so deeply that it cannot be followed.
    """
    try:
        return _check(text, path)
    except RecursionError:
        raise ConfigError(f"{path}: could not be read: too deeply nested") from None


def _check(text: str, path: str) -> Report:
    script = Script(text, path)
    context = Context(script)
    ignored = Ignored(text)
    seen: dict[tuple[str, int], Hit] = {}
    for rule in ALL:
        for hit in rule(context):
            if not ignored.covers(hit.code, hit.line, _end(script, hit.line)):
                seen.setdefault((hit.code, hit.line), hit)
    hits = sorted(seen.values(), key=lambda h: (h.line, h.code))
    return Report(
        path=path,
        kind="script",
        hits=tuple(hits),
        items=tuple(checklist(context)),
        source=tuple(script.lines),
    )


def _end(script: Script, line: int) -> int:
    """The last line of the shortest statement that begins there."""
    ends = [n.end_lineno or line for n in script.nodes if getattr(n, "lineno", 0) == line and hasattr(n, "end_lineno")]
    return max(ends, default=line) if len(ends) < 200 else line
