"""Every bit of weights, optimizer state and buffers, from one update to the next.

Nothing but the user may change them in between. Memory is added up as 64-bit words, by rows and by columns of
rectangles: any one word that has changed since shows as one row and one column that are off by the same amount, which
names the word and gives back what it was. Small tensors are copied instead, all of them with one launch. So a flipped
bit is found, named and repaired without a snapshot and without running anything again.

Cost: state is read from memory once after an update and once before the next. A rectangle fits into a core's cache, so
that its columns are added up there; results have their memory from the beginning; tensors are looked up by identity.
They are read in the reverse order of the update: what it wrote last is still in the cache, and what it reads first is
there again.

What the program writes itself is told apart: an operation of torch moves the version counter of its tensor, and what
goes around it (`.data`, numpy, another process) changes more than the few bits that a fault in memory changes, more
than two tensors, or brings what was beyond a bound to it.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import is_dense, is_sharded, is_writable, local_part
from steadystep._utils.text import plain_name
from steadystep.records import BitFlip
from steadystep.signals.raw_memory import WIDTH, Integers, MemoryChange, RawMemory

Checks = Literal["off", "sampled", "full"]

_version = operator.attrgetter("_version")

SAMPLED_EVERY, _SAMPLED_AT = 16, 5  # steps; each time the other half of the tensors
_NAMED_EVERY = 64  # times: to ask a model for its parameters takes as long as to add them up
_MOST_TENSORS = 2  # at once: a fault changes one or two, a loop over the parameters all of them
_EDITS = 3  # times, after which a tensor is known to be written by the program


@final
class _Sums:
    """What some tensors of one device hold, once `take` was called."""

    def __init__(self, members: Sequence[RawMemory]) -> None:
        self.members = members
        self._small = [each for each in members if each.rest.numel()]
        self._rests = [each.rest for each in self._small]
        self._words = [words for each in members for words in each.words]
        self._tensors = [each.tensor for each in members]
        self._versions = [each.version for each in members]
        device, height = members[0].tensor.device, [len(words) for words in self._words]
        count, total = sum(map(Tensor.numel, self._rests)), sum(height)
        # before and now, copies behind sums, so that one comparison does; in words: of bytes it takes ten times as long
        self._both = [torch.zeros(total - (-count // 8), dtype=torch.int64, device=device) for _ in range(2)]
        self._rows = [each[:total] for each in self._both]
        self._bytes = [each[total:].view(torch.uint8)[:count] for each in self._both]
        before, now = ([*torch.split(rows, height)] if height else [] for rows in self._rows)
        columns = torch.empty((len(height), WIDTH), dtype=torch.int64, device=device).unbind()
        self._before = [*zip(self._words, before, columns, strict=True)]
        self._now = [*zip(self._words, now, strict=True)]

    def take(self) -> None:
        """Add up."""
        self._versions = [*map(_version, self._tensors)]
        if self._rests:
            torch.cat(self._rests, out=self._bytes[0])
        # why row by column, piece by piece: the second pass finds the first one's memory in the cache
        for words, rows, columns in self._before:
            torch.sum(words, 1, out=rows)
            torch.sum(words, 0, out=columns)

    def differ(self) -> Tensor:
        """Whether anything has changed, on the device."""
        if self._rests:
            torch.cat(self._rests, out=self._bytes[1])
        for words, rows in self._now:
            torch.sum(words, 1, out=rows)
        before, now = self._both
        return (before != now).any()

    def changes(self) -> list[tuple[RawMemory, MemoryChange]]:
        """Each tensor whose memory differs, and how. Reads all of them: only once something is known to differ."""
        self.differ()  # why again: whoever asked several groups stopped at the first that differed
        for each, version in zip(self.members, self._versions, strict=True):
            each.version = version
        found: dict[str, tuple[RawMemory, MemoryChange]] = {}
        sizes = [each.rest.numel() for each in self._small]
        for each, old, now in zip(self._small, *_split(sizes, *self._bytes), strict=True):
            if (old != now).any():
                found[each.name] = each, MemoryChange()
                found[each.name][1].add_rest(each, old, now)
        heights = [len(words) for words in self._words]
        sides = zip(*_split(heights, *self._rows), (columns for _, _, columns in self._before), strict=True)
        for each in self.members:
            first = 0
            for words, (old, now, columns) in zip(each.words, sides, strict=False):
                if (old != now).any():
                    _, change = found.setdefault(each.name, (each, MemoryChange()))
                    off = (words.sum(0) - columns).cpu().numpy()  # sync: only after damage
                    change.add_words(words, first, now - old, off)
                first += words.nbytes
        return list(found.values())


@final
class _Plan:
    """Tensors as they were found, which keeps their identity alive, and their sums by device."""

    def __init__(self, held: Sequence[Tensor], pointers: list[int], groups: list[_Sums]) -> None:
        self._held, self._pointers, self.groups = held, pointers, groups

    def fits(self, held: Sequence[Tensor], pointers: list[int]) -> bool:
        """Still the same tensors, in the same place."""
        return self._pointers == pointers and all(map(operator.is_, self._held, held))


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
        self._plans: dict[int | str, _Plan] = {}
        self._named: list[tuple[str, nn.Parameter]] = []
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = []
        """Buffers: a name, and where its module holds it."""
        self._look_around()
        self._takes = 0
        self._sums: list[_Sums] = []
        self._of_buffers: list[_Sums] = []
        self._edits: dict[str, int] = {}
        self._waiting: tuple[BitFlip, ...] = ()
        """Found and repaired before a forward pass, to be told with the step that follows."""

    @torch.no_grad()
    def take(self, step: int) -> None:
        """The state is that of an update: remember it."""
        which = "all" if self._full else step // SAMPLED_EVERY % 2
        if self._takes % _NAMED_EVERY == 0:
            self._look_around()
        self._takes += 1
        self._sums = self._taken(which, self._state(), self._names_of_state)
        # why not sampled: the forward pass writes them, so they are read before it, which is a second host read
        self._of_buffers = self._taken("buffers", self._buffers(), self._names_of_buffers) if self._full else []
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
        self._plans.clear()
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
        """What has changed by itself since `take`, where a flag says so; put back where that was possible.

        Flags come first, before what else rode along.
        """
        told, self._waiting = self._waiting, ()
        if any(flags[: len(self._sums)]):
            told += self._found(self._sums, used=True)
        return told

    def _found(self, groups: Sequence[_Sums], *, used: bool) -> tuple[BitFlip, ...]:
        flips: list[BitFlip] = []
        changes = [each for sums in groups for each in sums.changes()]
        many = sum(not memory.edited for memory, _ in changes) > _MOST_TENSORS
        for memory, change in changes:
            tensor = memory.tensor
            bits = [] if many or memory.edited else change.bits(tensor)
            if not bits:  # the program wrote it
                self._edits[memory.name] = self._edits.get(memory.name, 0) + (not memory.edited)
                self._plans.clear()  # why: it may have been the last time that it is compared
                continue
            repaired = change.located and self._repairs
            if repaired:
                change.restore(memory)
            flips += [
                BitFlip(tensor=memory.name, index=index, bit=bit, repaired=repaired, used=used) for index, bit in bits
            ]
        return tuple(flips)

    def _taken(self, which: int | str, held: list[Tensor], names: Callable[[], list[str]]) -> list[_Sums]:
        """Of all tensors, or of every other one; set up again where one is new or elsewhere in memory."""
        pointers, plan = [*map(Tensor.data_ptr, held)], self._plans.get(which)
        if plan is None or not plan.fits(held, pointers):
            named = [*zip(names(), held, strict=True)]
            chosen = named if isinstance(which, str) else named[which::2]
            plan = self._plans[which] = _Plan(held, pointers, self._groups(chosen[::-1]))
        for sums in plan.groups:
            sums.take()
        return plan.groups

    def _groups(self, named: Sequence[tuple[str, Tensor]]) -> list[_Sums]:
        by_device: dict[torch.device, list[RawMemory]] = {}
        for name, tensor in named:
            known = self._edits.get(name, 0) >= _EDITS or type(tensor) not in (Tensor, nn.Parameter)
            if tensor.numel() and not known and is_writable(tensor) and is_dense(tensor):
                by_device.setdefault(tensor.device, []).append(RawMemory(name, tensor))
        return [_Sums(members) for members in by_device.values()]

    def _look_around(self) -> None:
        """Find parameters, and the places of buffers: another tensor may be put there at any time."""
        self._named = [(plain_name(name), parameter) for name, parameter in self._model.named_parameters()]
        self._places = [
            (plain_name(name), self._model.get_submodule(prefix)._buffers, key)
            for name, _ in self._model.named_buffers()
            for prefix, _, key in [name.rpartition(".")]
        ]

    def _state(self) -> list[Tensor]:
        """Each parameter and what the optimizer holds for it, as `_names_of_state` names them."""
        found, own = list[Tensor](), self._optimizer.state.get  # why get: hashing a parameter is a call of Python
        for _, parameter in self._named:
            found.append(parameter)
            if slots := own(parameter):
                found += [value for value in slots.values() if isinstance(value, Tensor)]
        return [local_part(tensor) for tensor in found] if is_sharded(found) else found

    def _names_of_state(self) -> list[str]:
        found = []
        for name, parameter in self._named:
            slots = self._optimizer.state.get(parameter, {}).items()
            found += [name, *(f"{key} of {name}" for key, value in slots if isinstance(value, Tensor))]
        return found

    def _buffers(self) -> list[Tensor]:
        held = [owner.get(key) for _, owner, key in self._places]
        return [buffer for buffer in held if buffer is not None]

    def _names_of_buffers(self) -> list[str]:
        return [name for name, owner, key in self._places if owner.get(key) is not None]


def _split(sizes: Sequence[int], *tensors: Tensor) -> list[list[Integers]]:
    ends = np.cumsum(sizes)[:-1]
    return [np.split(tensor.cpu().numpy(), ends) if sizes else [] for tensor in tensors]  # sync: only after damage
