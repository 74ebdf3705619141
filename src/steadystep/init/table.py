"""What an initialisation set, parameter by parameter, and what it left alone."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InitRow:
    """One tensor: the rule it was filled by, or why it was not."""

    name: str
    shape: tuple[int, ...]
    rule: str
    """The rule in words; for an untouched tensor, the reason."""
    std: float = 0.0
    """The standard deviation drawn from; 0 for constants."""
    also: tuple[str, ...] = ()
    """Other names of the same (tied) tensor."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InitTable:
    """`str(table)` is meant to be read: one line per tensor, the untouched ones at the end.

    >>> row = InitRow(name="head.weight", shape=(10, 4), rule="N(0, std)", std=0.02)
    >>> print(InitTable(recipe="small", rows=(row,), untouched=()))
    small: 1 tensor set, none untouched
      head.weight  10x4  std 0.02  N(0, std)
    """

    recipe: str
    rows: tuple[InitRow, ...]
    untouched: tuple[InitRow, ...]

    def __str__(self) -> str:
        left = f"{len(self.untouched)} untouched" if self.untouched else "none untouched"
        lines = [f"{self.recipe}: {len(self.rows)} tensor{'s' * (len(self.rows) != 1)} set, {left}"]
        cells = [_cells(row, f"std {row.std:.3g}") for row in self.rows]
        cells += [_cells(row, "untouched") for row in self.untouched]
        widths = [max((len(c[i]) for c in cells), default=0) for i in range(3)]
        lines += ["  " + "  ".join([*(c[i].ljust(widths[i]) for i in range(3)), c[3]]) for c in cells]
        return "\n".join(lines)

    def row(self, name: str) -> InitRow:
        """The line of one tensor, by any of its names."""
        for row in (*self.rows, *self.untouched):
            if name == row.name or name in row.also:
                return row
        raise KeyError(name)


def _cells(row: InitRow, std: str) -> tuple[str, str, str, str]:
    shape = "x".join(str(n) for n in row.shape) or "scalar"
    tied = f" (tied: {', '.join(row.also)})" if row.also else ""
    return row.name, shape, std, row.rule + tied
