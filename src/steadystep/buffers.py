"""Buffers the forward pass writes (BatchNorm statistics and the like): remembered, looked at, put back.

Which buffers are written cannot be read off a version counter alone: torch's own batch_norm kernel and code that
writes through `.data` do not move it. So every buffer starts *live*; one that holds the same content at a probe step
goes *quiet* (a mask, a rotary table) and costs a version check per step from then on. A module all of whose buffers are
quiet wakes up as a whole when one of them moves or when it changes between training and evaluation.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from steadystep.names import plain

_PROBE_EVERY = 1024  # steps; before that at 0, 1, 2, 4, 8, ...
_JUDGED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@final
class _Slot:
    """One buffer's place in its module, and the last good copy of it."""

    __slots__ = ("copy", "exempt", "key", "live", "name", "owner", "seen", "version")

    def __init__(self, name: str, owner: dict[str, Tensor | None], key: str) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.live = True
        self.exempt = False
        self.seen: Tensor | None = None
        self.copy: Tensor | None = None
        self.version = -1
        self.start()

    @property
    def tensor(self) -> Tensor | None:
        """The buffer as it is now, if it is of a kind that can be copied and put back."""
        tensor = self.owner.get(self.key)
        return tensor if tensor is not None and _is_plain(tensor) else None

    def start(self) -> None:
        """Copy from scratch: the first time, and when shape, dtype or device changed."""
        tensor, had = self.tensor, self.copy
        self.seen = tensor
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
        self._modules = list(_modules_with_buffers(model))
        self._slots = [slot for module in self._modules for slot in module.slots]
        self._restores = restores

    @property
    def names(self) -> tuple[str, ...]:
        """Of all buffers, written or not."""
        return tuple(slot.name for slot in self._slots)

    def remember(self) -> None:
        """Copy what may be written next: one fused copy for all live buffers."""
        if not self._modules:
            return
        targets, sources = [], []
        for slot in self._live():
            tensor = slot.tensor
            if tensor is not None and slot.copy is not None and slot.comparable(tensor):
                slot.seen, slot.version = tensor, tensor._version
                targets.append(slot.copy)
                sources.append(tensor.detach())
            else:
                slot.start()
        if targets:
            torch._foreach_copy_(targets, sources)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever happens inside, buffers are afterwards what they were: the same tensors with the same content."""
        kept = [(slot, slot.owner.get(slot.key)) for slot in self._slots]
        copies = [None if tensor is None or not _is_plain(tensor) else tensor.detach().clone() for _, tensor in kept]
        try:
            yield
        finally:
            with torch.no_grad():
                for (slot, tensor), copy in zip(kept, copies, strict=True):
                    slot.owner[slot.key] = tensor
                    if tensor is not None and copy is not None:
                        tensor.copy_(copy)

    @property
    def finite(self) -> bool:
        """Whether none that is judged holds NaN or infinity."""
        return all(bool(tensor.isfinite().all()) for tensor in self.suspects()[1])  # sync: only in trouble

    def suspects(self) -> tuple[list[str], list[Tensor]]:
        """Live floating-point buffers, to be looked at for NaN and infinity."""
        names: list[str] = []
        tensors: list[Tensor] = []
        if self._modules:
            for slot in self._live():
                tensor = slot.tensor
                if tensor is not None and tensor.numel() and not slot.exempt and slot.comparable(tensor):
                    names.append(slot.name)
                    tensors.append(tensor.detach())
        return names, tensors

    def newly_bad(self, names: Sequence[str]) -> tuple[str, ...]:
        """Of these non-finite buffers, those that were finite before the forward pass; the rest is not its doing."""
        bad = []
        for slot in self._slots:
            if slot.name in names:
                before = slot.copy
                slot.exempt = before is not None and not bool(before.isfinite().all())  # sync: only after trouble
                if not slot.exempt:
                    bad.append(slot.name)
        return tuple(bad)

    def probe(self, step: int) -> list[Tensor]:
        """At probe steps: for each buffer a flag on the device, whether it differs from its copy."""
        if not self._modules or (step & (step - 1) and step % _PROBE_EVERY):
            return []
        return [_differs(slot) for slot in self._slots]

    def learn(self, differs: Sequence[float]) -> None:
        """What the probe showed: a buffer that does not differ goes quiet."""
        for slot, flag in zip(self._slots, differs, strict=True):
            slot.live = flag != 0.0

    def put_back(self) -> None:
        """The refused forward pass leaves no trace here."""
        if self._restores and self._modules:
            self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        for slot in self._live():
            if slot.seen is None:
                if slot.tensor is not None:
                    slot.owner[slot.key] = None
            elif slot.copy is not None:
                slot.owner[slot.key] = slot.seen
                slot.seen.copy_(slot.copy)
                slot.version = slot.seen._version

    def _live(self) -> Iterator[_Slot]:
        return (slot for module in self._modules for slot in module.live())


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
            slots.append(_Slot(plain(name), module._buffers, key))
        if slots:
            yield _Module(module, slots)


def _is_plain(tensor: Tensor) -> bool:
    """Dense memory of its own. Sparse, expanded, quantised, lazy and inference tensors are constants to us."""
    if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    if tensor.is_quantized or tensor.is_inference():
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _differs(slot: _Slot) -> Tensor:
    tensor, copy = slot.tensor, slot.copy
    if tensor is None or copy is None or not slot.comparable(tensor):
        return torch.tensor(tensor is not copy)
    return (tensor.detach() != copy).any()
