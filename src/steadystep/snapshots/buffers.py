"""Buffers the forward pass writes (BatchNorm statistics and the like): remembered, looked at, put back.

Which buffers are written cannot be read off a version counter alone: torch's own batch_norm kernel and code that
writes through `.data` do not move it. So every buffer starts *live*; one that holds the same content at a probe step
goes *quiet* (a mask, a rotary table) and costs a version check per step from then on. A module all of whose buffers are
quiet wakes up as a whole when one of them moves or when it changes between training and evaluation.

Two copies are kept, the last one and the one before: what something else than the forward pass has damaged since is
told apart by them, and put back from the older one.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from steadystep._utils.modules import TensorCopy
from steadystep._utils.tensors import is_writable, local_part
from steadystep._utils.text import plain_name
from steadystep.stats import is_absurd

_PROBE_EVERY = 1024  # steps; before that at 0, 1, 2, 4, 8, ...
_ALL_EVERY, _ALL_AT = 20, 7  # steps: quiet ones are looked at together with the weights
_LEAP = 1000.0  # times as large as before: no longer the same statistics
_AGAIN = 100  # copies: what is damaged again so soon is written by the program itself, and left alone from then on
_JUDGED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@final
class _Slot:
    """One buffer's place in its module, and the last good copy of it."""

    __slots__ = (
        "copy", "damaged_at", "exempt", "held", "key", "live", "name", "older", "owner", "seen", "version", "written"
    )  # fmt: skip

    def __init__(self, name: str, owner: dict[str, Tensor | None], key: str) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.live = True
        self.exempt = False
        self.held: Tensor | None = None
        """As its module holds it."""
        self.seen: Tensor | None = None
        """The same, or this rank's part of a DTensor."""
        self.copy: Tensor | None = None
        self.older: Tensor | None = None
        """The copy before the last one."""
        self.written = False
        """The forward pass writes it, as was seen at a probe step."""
        self.damaged_at = -_AGAIN
        self.version = -1
        self.start()

    @property
    def tensor(self) -> Tensor | None:
        """The buffer as it is now, or this rank's part, if it is of a kind that can be copied and put back."""
        tensor = self.owner.get(self.key)
        if tensor is self.held:  # looked at before: asked for several times a step, it may cost nothing
            return self.seen
        return local_part(tensor) if tensor is not None and is_writable(tensor) else None

    def start(self) -> None:
        """Copy from scratch: the first time, and when shape, dtype or device changed."""
        tensor, had = self.tensor, self.copy
        self.held = None if tensor is None else self.owner[self.key]
        self.seen, self.older = tensor, None
        self.copy = None if tensor is None else tensor.detach().clone()
        if tensor is not None:
            self.version = tensor._version
            # A cache that grows is no statistic, nor is a mask: neither is judged.
            grown = had is not None and had.shape != tensor.shape
            self.exempt = self.exempt or grown or tensor.dtype not in _JUDGED or not bool(tensor.isfinite().all())

    def comparable(self, tensor: Tensor | None) -> bool:
        copy = self.copy
        if tensor is None or copy is None:
            return tensor is copy
        return tensor.shape == copy.shape and tensor.dtype == copy.dtype and tensor.device == copy.device

    def next_copy(self) -> Tensor:
        """Room for another copy; the last one becomes the older one."""
        assert self.copy is not None
        room = torch.empty_like(self.copy) if self.older is None else self.older
        self.older, self.copy = self.copy, room
        return room

    def moved(self) -> bool:
        tensor = self.tensor
        return tensor is not self.seen or (tensor is not None and tensor._version != self.version)


@final
class _Module:
    """The buffers of one module."""

    __slots__ = ("module", "slots", "was_training")

    def __init__(self, module: nn.Module, slots: list[_Slot]) -> None:
        self.module, self.slots = module, slots
        self.was_training = module.training

    def live(self) -> list[_Slot]:
        """Those to care about now."""
        if self.module.training != self.was_training or (
            not any(slot.live for slot in self.slots) and any(slot.moved() for slot in self.slots)
        ):
            self.was_training = self.module.training
            for slot in self.slots:
                slot.live = True
        for slot in self.slots:
            slot.live = slot.live or slot.moved()
        return [slot for slot in self.slots if slot.live]


@final
class Buffers:
    """All buffers of a model. `remember` before the forward pass, `put_back` when its step is refused."""

    def __init__(self, model: nn.Module, *, restores: bool = True) -> None:
        self.modules = list(_modules_with_buffers(model))
        self._slots = [slot for module in self.modules for slot in module.slots]
        self._restores = restores
        self._probed = False
        self._copies = 0
        """How often they were copied."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all buffers, written or not."""
        return tuple(slot.name for slot in self._slots)

    def judged(self) -> tuple[str, ...]:
        """Names of those that are to be finite: they were from the beginning, and are no masks or caches."""
        return tuple(slot.name for slot in self._slots if not slot.exempt and slot.tensor is not None)

    def remember(self) -> None:
        """Copy what may be written next: one fused copy for all live buffers."""
        if not self.modules:
            return
        self._copies += 1
        targets, sources = [], []
        for slot in self._live():
            tensor = slot.tensor
            if tensor is not None and slot.copy is not None and slot.comparable(tensor):
                slot.seen, slot.held, slot.version = tensor, slot.owner[slot.key], tensor._version
                targets.append(slot.next_copy())
                sources.append(tensor.detach())
            else:
                slot.start()
        if targets:
            torch._foreach_copy_(targets, sources)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever happens inside, buffers are afterwards what they were: the same tensors with the same content."""
        kept = [(slot, slot.owner.get(slot.key)) for slot in self._slots]
        copies = [TensorCopy(tensor) for _, tensor in kept if tensor is not None and is_writable(tensor)]
        try:
            yield
        finally:
            for slot, tensor in kept:
                slot.owner[slot.key] = tensor
            for copy in copies:
                copy.write()

    @property
    def finite(self) -> bool:
        """Whether none that is judged holds NaN or infinity."""
        return all(bool(tensor.isfinite().all()) for tensor in self.suspects()[1])  # sync: only in trouble

    def suspects(self, step: int | None = None) -> tuple[list[str], list[Tensor]]:
        """Live floating-point buffers, to be looked at for NaN and infinity; at some steps the quiet ones too."""
        names: list[str] = []
        tensors: list[Tensor] = []
        if self.modules:
            everything = step is not None and (step % _ALL_EVERY == _ALL_AT or self._is_probed(step))
            for slot in self._slots if everything else self._live():
                tensor = slot.tensor
                if tensor is not None and tensor.numel() and not slot.exempt and slot.comparable(tensor):
                    names.append(slot.name)
                    tensors.append(tensor.detach())
        return names, tensors

    def newly_bad(self, names: Sequence[str], *, grave: bool) -> tuple[str, ...]:
        """Of these non-finite buffers, those that are not meant to be; with a `grave` step also quiet ones.

        What the forward pass did is undone with it. What was not finite before it came from outside: a NaN, an infinity
        in a running statistic or one that spoils the step is damage. Done again and again, it is the program's own way.
        """
        bad = []
        for slot in self._slots:
            spoiled = grave and not slot.live and not slot.exempt and not _is_finite(slot.tensor)
            if (slot.name in names or spoiled) and self._is_damaged(slot, grave=grave):
                bad.append(slot.name)
        return tuple(bad)

    def _is_damaged(self, slot: _Slot, *, grave: bool) -> bool:
        # sync: all of this only after trouble
        outside = not _is_finite(slot.copy)
        if not outside and slot.live:  # what has spoiled a quiet one did not move it
            return True
        is_damage = grave or slot.written or bool(slot.tensor is not None and slot.tensor.isnan().any())
        known = slot.copy if not outside else slot.older
        again = self._copies - slot.damaged_at < _AGAIN
        is_damage = is_damage and not again and known is not None and _is_finite(known)
        slot.exempt = not is_damage or not self._restores  # whoever only looks on is told once
        slot.damaged_at, slot.live = self._copies, slot.live or is_damage
        return is_damage

    def probe(self, step: int) -> list[Tensor]:
        """At probe steps and the first time: for each buffer a flag on the device, whether it differs from its copy."""
        if not self.modules or not self._is_probed(step):
            return []
        self._probed = True
        return [_differs(slot) for slot in self._slots]

    def _is_probed(self, step: int) -> bool:
        return not self._probed or not step & (step - 1) or not step % _PROBE_EVERY

    def learn(self, differs: Sequence[float]) -> None:
        """What the probe showed: a buffer that does not differ goes quiet."""
        for slot, flag in zip(self._slots, differs, strict=True):
            slot.live = slot.written = flag != 0.0

    def put_back(self, *, outside: bool = True) -> None:
        """The refused forward pass leaves no trace here; with `outside`, nor does what had damaged a buffer before."""
        if self._restores and self.modules:
            self._restore(self._damaged() if outside else {})

    @torch.no_grad()
    def _restore(self, damaged: dict[str, Tensor]) -> None:
        for slot in self._slots:
            slot.live = slot.live or slot.name in damaged
        for slot in self._live():
            if slot.seen is None:
                if slot.tensor is not None:
                    slot.owner[slot.key] = None
            elif slot.copy is not None:
                slot.owner[slot.key] = slot.held
                slot.seen.copy_(damaged.get(slot.name, slot.copy))
                slot.version = slot.seen._version

    def _damaged(self) -> dict[str, Tensor]:
        """Those that something else than the forward pass has spoiled since the last copy, and what they were."""
        known: dict[str, Tensor] = {}
        for slot in self._slots:
            tensor, copy = slot.tensor, slot.copy
            if tensor is None or copy is None or slot.exempt or not copy.numel() or not slot.comparable(tensor):
                continue
            before, now = (slot.older, copy) if slot.live else (copy, tensor.detach())
            if before is not None and before.shape == now.shape and _leapt(before, now, statistic=slot.written):
                known[slot.name] = before
        return known

    def _live(self) -> Iterator[_Slot]:
        return (slot for module in self.modules for slot in module.live())


def _modules_with_buffers(model: nn.Module) -> Iterator[_Module]:
    taken: set[int] = set()
    for prefix, module in model.named_modules():
        slots = []
        for key, tensor in module._buffers.items():
            if id(tensor) in taken:  # shared with another module
                continue
            if tensor is not None:
                taken.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            slots.append(_Slot(plain_name(name), module._buffers, key))
        if slots:
            yield _Module(module, slots)


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or not tensor.is_floating_point() or bool(tensor.isfinite().all())  # sync: only in trouble


def _leapt(before: Tensor, now: Tensor, *, statistic: bool) -> bool:
    """From finite to not, to a size that nothing has, or a thousandfold where it is a statistic."""
    peaks = torch.stack([before.abs().max().double(), now.abs().max().double()]).tolist()  # sync: only in trouble
    was, is_now = peaks
    if not math.isfinite(was) or is_now <= _LEAP * was:
        return False
    if not math.isfinite(is_now) or (is_absurd(is_now) and not is_absurd(was)):
        return True
    return statistic and was > 0.0


def _differs(slot: _Slot) -> Tensor:
    tensor, copy = slot.tensor, slot.copy
    if tensor is None or copy is None or not slot.comparable(tensor):
        return torch.tensor(tensor is not copy)
    return (tensor.detach() != copy).any()
