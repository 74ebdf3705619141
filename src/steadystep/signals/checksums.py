"""Every bit of weights, optimizer state and buffers, from one update to the next.

Nothing but the user may change them in between. Memory is added up as 64-bit words, by rows and by columns of a
rectangle: any one word that has changed since shows as one row and one column that are off by the same amount, which
names the word and gives back what it was. Small tensors are copied instead, all of them with one launch. So a flipped
bit is found, named and repaired without a snapshot and without running anything again.

What the program writes itself is told apart: an operation of torch moves the version counter of its tensor, and what
goes around it (`.data`, numpy, another process) changes more than the few bits that a fault in memory changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import is_dense, is_writable, local_part
from steadystep._utils.text import plain_name
from steadystep.records import BitFlip

Checks = Literal["off", "sampled", "full"]
Integers = NDArray[np.integer[Any]]

SAMPLED_EVERY, _SAMPLED_AT = 16, 5  # steps; each time the other half of the tensors
_SMALL = 1 << 15  # bytes: below, a copy costs no more than two sums
_MOST_BITS = 4  # in one tensor: memory that fails changes a few, code that writes changes many
_MOST_WORDS = 2
_NAMED_EVERY = 64  # times: to ask a model for its parameters takes as long as to add them up
_EDITS = 3  # times, after which a tensor is known to be written by the program


@final
class _Memory:
    """One tensor as raw memory: a rectangle of words, and bytes that do not fill one."""

    __slots__ = ("name", "pointer", "rest", "tensor", "version", "words")

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.pointer, self.version = tensor.data_ptr(), tensor._version
        flat = _flat(tensor)
        size = flat.element_size()
        aligned = flat.nbytes > _SMALL and not flat.storage_offset() * size % 8
        count = flat.nbytes // 8 if aligned else 0
        width = 1 << (count.bit_length() // 2)
        whole = count // width * width * 8 // size
        self.words = flat[:whole].view(torch.int64).view(-1, width) if count else None
        self.rest = flat[whole:].view(torch.uint8)

    def fits(self, tensor: Tensor) -> bool:
        """Still the same memory."""
        return tensor is self.tensor and tensor.data_ptr() == self.pointer

    @property
    def edited(self) -> bool:
        """An operation of torch has written it since, or put other memory in its place."""
        return self.tensor._version != self.version or self.tensor.data_ptr() != self.pointer


@final
class _Change:
    """What has changed in one tensor, byte by byte: what each was."""

    def __init__(self) -> None:
        self.old: dict[int, int] = {}
        self.now: dict[int, int] = {}
        self.located = True
        """All of it is known."""
        self.wide = False
        """Far more has changed than a fault in memory changes."""

    def add_rest(self, memory: _Memory, old: Integers, now: Integers) -> None:
        """Compare the copied bytes."""
        at = np.flatnonzero(old != now)
        self.wide = self.wide or len(at) > _MOST_BITS
        first = 0 if memory.words is None else memory.words.nbytes
        self.old |= {first + int(i): int(old[i]) for i in at[:_MOST_BITS]}
        self.now |= {first + int(i): int(now[i]) for i in at[:_MOST_BITS]}

    def add_words(self, memory: _Memory, rows: Integers, columns: Integers) -> None:
        """Rows and columns that are off by the same amount cross at a word; of those alike nothing can be told."""
        assert memory.words is not None
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
        width = memory.words.shape[1]
        for row, column, amount in found:
            now = memory.words[int(row), int(column)].cpu().numpy().reshape(1)  # sync: only after damage
            pair = zip((now - amount).view(np.uint8), now.view(np.uint8), strict=True)
            for i, (was, byte) in enumerate(pair, start=8 * (int(row) * width + int(column))):
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
        return [] if self.wide or counted or len(flips) > _MOST_BITS else flips

    def restore(self, memory: _Memory) -> None:
        """Write what was there."""
        flat = _flat(memory.tensor).view(torch.uint8)
        for i, old in self.old.items():
            flat[i] = old


@final
class _Sums:
    """What some tensors of one device held."""

    def __init__(self, members: Sequence[_Memory]) -> None:
        self._small = [each for each in members if each.rest.numel()]
        self._wide = [each for each in members if each.words is not None]
        self._copy = _rests(self._small)
        # why row by column, tensor by tensor: the second pass finds the first one's memory in the cache
        self._sides = [(each.words.sum(1), each.words.sum(0)) for each in self._wide if each.words is not None]
        self._totals = torch.stack([rows.sum() for rows, _ in self._sides]) if self._sides else torch.empty(0)

    def differ(self) -> Tensor:
        """Whether anything has changed, on the device. A word that has changes the sum of all words."""
        copy = (_rests(self._small) != self._copy).any()
        return copy | (self._totals_now() != self._totals).any() if self._wide else copy

    def _totals_now(self) -> Tensor:
        return torch.stack([each.words.sum() for each in self._wide if each.words is not None])

    def changes(self) -> list[tuple[_Memory, _Change]]:
        """Each tensor whose memory differs, and how. Reads all of them: only once something is known to differ."""
        found: dict[str, tuple[_Memory, _Change]] = {}
        sizes = [each.rest.numel() for each in self._small]
        for each, old, now in zip(self._small, *_split(sizes, self._copy, _rests(self._small)), strict=True):
            if (old != now).any():
                found[each.name] = each, _Change()
                found[each.name][1].add_rest(each, old, now)
        for each, (rows, columns) in zip(self._wide, self._sides, strict=True):
            assert each.words is not None
            off_rows, off_columns = each.words.sum(1) - rows, each.words.sum(0) - columns
            if bool(off_rows.any()):  # sync: only after damage
                _, change = found.setdefault(each.name, (each, _Change()))
                change.add_words(each, off_rows.cpu().numpy(), off_columns.cpu().numpy())  # sync: only after damage
        return list(found.values())


@final
class Checksums:
    """Taken after an update, compared before the next one is made."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, checks: Checks = "off", repairs: bool = True) -> None:
        self._model, self._optimizer = model, optimizer
        self._full = checks == "full"
        self.every, self.at = {"off": (1, -1), "sampled": (SAMPLED_EVERY, _SAMPLED_AT), "full": (1, 0)}[checks]
        """Steps between two checks, and which of them."""
        self._repairs = repairs
        self.armed = False
        """There is something to compare with."""
        self._memory: dict[str, _Memory] = {}
        self._named, self._takes = self._parameters(), 0
        self._sums: list[_Sums] = []
        self._of_buffers: list[_Sums] = []
        self._edits: dict[str, int] = {}
        self._waiting: tuple[BitFlip, ...] = ()
        """Found and repaired before a forward pass, to be told with the step that follows."""

    @torch.no_grad()
    def take(self, step: int) -> None:
        """The state is that of an update: remember it."""
        half = None if self._full else step // SAMPLED_EVERY % 2
        if self._takes % _NAMED_EVERY == 0:
            self._named = self._parameters()
        self._takes += 1
        self._sums = self._taken([*self._weights(), *self._state()], half)
        # why not sampled: the forward pass writes them, so they are read before it, which is a second host read
        self._of_buffers = self._taken(list(self._buffers()), None) if self._full else []
        self.armed = bool(self._sums or self._of_buffers)

    def renew(self, step: int) -> None:
        """The update of this step was made or refused: what was taken before it no longer counts."""
        if self.armed:
            self.drop()
        if step % self.every == self.at:
            self.take(step)

    def drop(self) -> None:
        """What was taken no longer counts."""
        self.armed, self._sums, self._of_buffers = False, [], []

    def forget(self) -> None:
        """Let go of all tensors."""
        self.drop()
        self._memory.clear()
        self._takes = 0

    @torch.no_grad()
    def verify(self, *, everything: bool = False) -> tuple[BitFlip, ...]:
        """Before a forward pass, which writes buffers: compare these now; `everything` before a state is kept."""
        groups = [*self._of_buffers, *(self._sums if everything else ())]
        differ = any(bool(sums.differ()) for sums in groups)  # sync: one per device, before a pass that is checked
        found = self._found(groups, used=False) if differ else ()
        self._waiting += found
        return found

    @torch.no_grad()
    def compare(self) -> list[Tensor]:
        """Begin to compare weights and optimizer state, on their devices: a flag of each, for `found`."""
        return [sums.differ().float() for sums in self._sums]

    @torch.no_grad()
    def found(self, flags: Sequence[float]) -> tuple[BitFlip, ...]:
        """What has changed by itself since `take`, where a flag says so; put back where that was possible."""
        told, self._waiting = self._waiting, ()
        if any(flags):
            told += self._found(self._sums, used=True)
        return told

    def _found(self, groups: Sequence[_Sums], *, used: bool) -> tuple[BitFlip, ...]:
        flips: list[BitFlip] = []
        for memory, change in [each for sums in groups for each in sums.changes()]:
            tensor = memory.tensor
            bits = [] if memory.edited else change.bits(tensor)
            if not bits:  # the program wrote it
                self._edits[memory.name] = self._edits.get(memory.name, 0) + (not memory.edited)
                continue
            repaired = change.located and self._repairs
            if repaired:
                change.restore(memory)
            flips += [
                BitFlip(tensor=memory.name, index=index, bit=bit, repaired=repaired, used=used) for index, bit in bits
            ]
        return tuple(flips)

    def _taken(self, named: Sequence[tuple[str, Tensor]], half: int | None) -> list[_Sums]:
        by_device: dict[torch.device, list[_Memory]] = {}
        for name, tensor in named if half is None else named[half::2]:
            memory = self._memory.get(name)
            if memory is None or not memory.fits(tensor):
                if (
                    not tensor.numel()
                    or self._edits.get(name, 0) >= _EDITS
                    or not (is_writable(tensor) and is_dense(tensor))
                ):
                    continue
                memory = self._memory[name] = _Memory(name, tensor)
            elif self._edits and self._edits.get(name, 0) >= _EDITS:
                continue
            memory.version = tensor._version
            by_device.setdefault(tensor.device, []).append(memory)
        return [_Sums(members) for members in by_device.values()]

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(plain_name(name), parameter) for name, parameter in self._model.named_parameters()]

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._named:
            yield name, local_part(parameter)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._model.named_buffers():
            yield plain_name(name), buffer

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._named:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and type(held := local_part(value)) is Tensor:
                    yield f"{key} of {name}", held


def _flat(tensor: Tensor) -> Tensor:
    """Its elements in the order of memory, sharing it; through `.data`, which leaves the version counter alone."""
    plain = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def _rests(members: Sequence[_Memory]) -> Tensor:
    return torch.cat([each.rest for each in members]) if members else torch.empty(0)


def _split(sizes: Sequence[int], *tensors: Tensor) -> list[list[Integers]]:
    ends = np.cumsum(sizes)[:-1]
    return [np.split(tensor.cpu().numpy(), ends) if sizes else [] for tensor in tensors]  # sync: only after damage
