"""What an attack found: one row per case, a table of counts for people, JSON lines for programs.

    options = arguments(__doc__)
    rows = Rows(options.out)
    rows.add("metrics", "metrics={3: 1.0}", passed=said is None, said=said)
    return rows.finish()                                     # prints the table; the exit code: 0 when all passed

A row is written as soon as it is known, so that a run that is stopped keeps what it has.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case of an attack."""

    group: str
    """What was attacked: a line of the table."""
    case: str
    """How, so that it can be found again; with the seed it names the case."""
    passed: bool
    said: str = ""
    """What the library said, or what was wrong."""
    numbers: dict[str, float] = field(default_factory=dict)


class Rows:
    """Collects rows, writes each to `out` at once, and sums them up at the end."""

    def __init__(self, out: Path | None = None, *, progress: bool = True) -> None:
        self.rows: list[Row] = []
        self._progress, self._started, self._spoke = progress, time.monotonic(), time.monotonic()
        self._file: TextIO | None = None
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file = out.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, group: str, case: str, *, passed: bool, said: object = "", **numbers: float) -> Row:
        """One more case."""
        row = Row(group=group, case=case, passed=bool(passed), said="" if said is None else str(said), numbers=numbers)
        self.rows.append(row)
        if self._file is not None:
            print(json.dumps(_plain(asdict(row)), allow_nan=False), file=self._file, flush=True)
        if self._progress and time.monotonic() - self._spoke > 10.0:
            self._spoke = time.monotonic()
            print(f"  {len(self.rows)} cases, {self._spoke - self._started:.0f} s", file=sys.stderr)
        return row

    def finish(self, *, shown: int = 40) -> int:
        """Print the table and what did not pass; the exit code."""
        self.close()
        print(table(self.rows))
        failed = [row for row in self.rows if not row.passed]
        for row in failed[:shown]:
            print(f"NOT: {row.group}: {row.case}: {_line(row.said)}")
        if len(failed) > shown:
            print(f"... and {len(failed) - shown} more: see --out")
        return 1 if failed or not self.rows else 0

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def table(rows: Iterable[Row]) -> str:
    """Counts per group in Markdown, as docs/reliability.md shows them, with the sum below."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    lines = [(name, str(len(found)), str(sum(row.passed for row in found))) for name, found in groups.items()]
    total = [row for found in groups.values() for row in found]
    lines.append(("all", str(len(total)), str(sum(row.passed for row in total))))
    return "\n".join(_columns([("attacked", "cases", "passed"), *lines]))


def arguments(
    about: str | None, argv: Sequence[str] | None = None, *, more: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """`--seed` and `--out`, which every attack has, and what `more` adds (made with add_help=False)."""
    parser = argparse.ArgumentParser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[] if more is None else [more],
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other cases (default 0)")
    parser.add_argument("--out", type=Path, help="write one JSON object per case to this file")
    return parser.parse_args(argv)


def _columns(lines: list[tuple[str, str, str]]) -> list[str]:
    first, *rest = zip(*lines, strict=True)
    widths = [max(map(len, first)), *(max(map(len, column)) for column in rest)]
    head, *body = (
        f"| {name:<{widths[0]}} | {cases:>{widths[1]}} | {passed:>{widths[2]}} |" for name, cases, passed in lines
    )
    rule = f"|{'-' * (widths[0] + 2)}|{'-' * (widths[1] + 1)}:|{'-' * (widths[2] + 1)}:|"
    return [head, rule, *body]


def _line(text: str, width: int = 240) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
