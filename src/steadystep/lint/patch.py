"""Fixes as data: a unified diff taken apart into replaced lines, and a text with them applied."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? ")
_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Whole lines of a file, and the lines that replace them."""

    first: int
    """Number of the first line, from 1; with nothing in `old`, the line in front of which `new` goes."""
    old: tuple[str, ...]
    """The lines that go."""
    new: tuple[str, ...]
    """The lines that come."""


def replacements(diff: str) -> tuple[Replacement, ...]:
    """Return what a unified diff changes, without its context, from top to bottom."""
    found: list[Replacement] = []
    old: list[str] = []
    new: list[str] = []
    at = 1

    def close() -> None:
        if old or new:
            found.append(Replacement(first=at - len(old), old=tuple(old), new=tuple(new)))
        old.clear()
        new.clear()

    for line in diff.split("\n")[2:]:
        hunk = _HUNK.match(line)
        if hunk is not None:
            close()
            at = int(hunk[1]) + (hunk[2] == "0")
        elif line.startswith("-"):
            old.append(line[1:])
            at += 1
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            close()
            at += 1
    close()
    return tuple(found)


def split_lines(text: str) -> list[tuple[str, str]]:
    r"""Return the lines of a text, each with its own ending.

    >>> split_lines("a\r\nb")
    [('a', '\r\n'), ('b', '')]
    """
    return [(found[1], found[2]) for found in _LINE.finditer(text) if found[0]]


def plain(text: str) -> str:
    r"""Return the text with `\n` as the ending of every line, as Python reads it."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def apply(text: str, changes: Sequence[Replacement]) -> str | None:
    """Return the text with the changes made, its line endings kept; None if the changes do not fit the text."""
    lines = split_lines(text)
    usual = lines[0][1] if lines and lines[0][1] else "\n"
    unended = bool(lines) and not lines[-1][1]
    if unended:
        lines[-1] = (lines[-1][0], usual)
    for change in sorted(changes, key=lambda c: c.first, reverse=True):
        begin, end = change.first - 1, change.first - 1 + len(change.old)
        if begin > len(lines) or [line for line, _ in lines[begin:end]] != list(change.old):
            return None
        ending = lines[begin - 1][1] if begin else usual
        lines[begin:end] = [(line, ending) for line in change.new]
    whole = "".join(line + ending for line, ending in lines)
    return whole.removesuffix(lines[-1][1]) if unended and lines else whole
