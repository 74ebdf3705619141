"""Rows as text."""

from collections.abc import Sequence


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they must be."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    print(f"\n{title}")
    for row in [list(head), ["-" * width for width in widths], *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
