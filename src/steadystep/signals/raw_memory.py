"""A tensor as raw memory, and what has changed in it: which bits of which elements, and what they were."""

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.integer[Any]]

WIDTH = 512  # words of a row
_ROWS = 256  # of a rectangle on a CPU: one megabyte, half of a core's cache
_SMALL = 1 << 15  # bytes: below, a copy costs no more than two sums
_MOST_BITS = 4  # in one tensor: memory that fails changes a few, code that writes changes many
_MOST_WORDS = 2


@final
class RawMemory:
    """One tensor as raw memory: rectangles of words, and bytes that do not fill one."""

    __slots__ = ("name", "pointer", "rest", "tensor", "version", "words")

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.pointer, self.version = tensor.data_ptr(), tensor._version
        flat = _flat(tensor)
        size = flat.element_size()
        aligned = flat.nbytes > _SMALL and not flat.storage_offset() * size % 8
        rows = flat.nbytes // (8 * WIDTH) if aligned else 0
        whole = rows * WIDTH * 8 // size
        words = flat[:whole].view(torch.int64).view(-1, WIDTH) if rows else None
        # why only there: elsewhere a launch costs more than a second pass
        high = _ROWS if tensor.device.type == "cpu" else rows
        self.words: tuple[Tensor, ...] = () if words is None else torch.split(words, high)
        self.rest = flat[whole:].view(torch.uint8)

    @property
    def edited(self) -> bool:
        """An operation of torch has written it since, or put other memory in its place."""
        return self.tensor._version != self.version or self.tensor.data_ptr() != self.pointer


@final
class MemoryChange:
    """What has changed in one tensor, byte by byte: what each was."""

    def __init__(self) -> None:
        self.old: dict[int, int] = {}
        self.now: dict[int, int] = {}
        self.located = True
        """All of it is known."""
        self.wide = False
        """Far more has changed than a fault in memory changes."""

    def add_rest(self, memory: RawMemory, old: Integers, now: Integers) -> None:
        """Compare the copied bytes."""
        at = np.flatnonzero(old != now)
        self.wide = self.wide or len(at) > _MOST_BITS
        first = sum(words.nbytes for words in memory.words)
        self.old |= {first + int(i): int(old[i]) for i in at[:_MOST_BITS]}
        self.now |= {first + int(i): int(now[i]) for i in at[:_MOST_BITS]}

    def add_words(self, words: Tensor, first: int, rows: Integers, columns: Integers) -> None:
        """Rows and columns that are off by the same amount cross at a word; of those alike nothing can be told."""
        off_rows, off_columns = np.flatnonzero(rows), np.flatnonzero(columns)
        few = max(len(off_rows), len(off_columns)) <= _MOST_WORDS
        self.wide = self.wide or not few
        self.located = self.located and few
        if not few:
            return
        if len(off_rows) == 1:
            found = [(off_rows[0], column, columns[column]) for column in off_columns]
        elif len(off_columns) == 1:
            found = [(row, off_columns[0], rows[row]) for row in off_rows]
        else:
            by_amount = {int(columns[column]): column for column in off_columns}
            found = [(row, by_amount[int(rows[row])], rows[row]) for row in off_rows if int(rows[row]) in by_amount]
            self.located = self.located and len({int(column) for _, column, _ in found}) == len(off_columns)
        for row, column, amount in found:
            now = words[int(row), int(column)].cpu().numpy().reshape(1)  # sync: only after damage
            pair = zip((now - amount).view(np.uint8), now.view(np.uint8), strict=True)
            for i, (was, byte) in enumerate(pair, start=first + 8 * (int(row) * WIDTH + int(column))):
                if was != byte:
                    self.old[i], self.now[i] = int(was), int(byte)

    def bits(self, tensor: Tensor) -> list[tuple[int, int]]:
        """Element and bit of each flip; none where it is the program that wrote."""
        size = tensor.element_size()
        flips = [
            (i // size, 8 * (i % size) + bit)
            for i, old in self.old.items()
            for bit in range(8)
            if (old ^ self.now[i]) >> bit & 1
        ]
        counted = not tensor.is_floating_point() and [bit for _, bit in flips] == [0]  # why: a counter that went on
        return [] if self.wide or counted or len(flips) > _MOST_BITS or self._clipped(tensor, len(flips)) else flips

    def _clipped(self, tensor: Tensor, num_bits: int) -> bool:
        """Each changed element was beyond what the tensor holds and is its largest or smallest now: `clamp_` does that.

        One bit can do it by chance, if it belongs to the largest element; then another element has to lie on the bound.
        """
        if not self.located or not tensor.is_floating_point():
            return False
        flat, size = _flat(tensor).detach().cpu(), tensor.element_size()  # sync: only after damage
        was = flat.clone()
        for i, old in self.old.items():
            was.view(torch.uint8)[i] = old
        at = torch.tensor(sorted({i // size for i in self.old}))
        now, before, low, high = flat[at], was[at], flat.min(), flat.max()
        bound = ((now == high) & (before > high)) | ((now == low) & (before < low))
        return bool(bound.all()) and (num_bits > 1 or int((flat.abs() == now.abs()).sum()) > 1)

    def restore(self, memory: RawMemory) -> None:
        """Write what was there."""
        flat = _flat(memory.tensor).view(torch.uint8)
        for i, old in self.old.items():
            flat[i] = old


def _flat(tensor: Tensor) -> Tensor:
    """Its elements in the order of memory, sharing it; through `.data`, which leaves the version counter alone."""
    plain = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
