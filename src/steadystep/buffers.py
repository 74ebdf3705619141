"""Buffers the forward pass writes (BatchNorm statistics and the like): remembered, looked at, put back.

Which buffers are written cannot be read off a version counter alone: torch's own batch_norm kernel and code that
writes through `.data` do not move it. So every module starts *live*; one whose buffers hold the same content at a
probe step goes *quiet* (a mask, a rotary table) and costs a version check per step from then on, until one moves.
"""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

_PROBE_EVERY = 1024  # steps; before that at 0, 1, 2, 4, 8, ...


@final
class _Slot:
    """One buffer's place in its module, and the last good copy of it."""

    __slots__ = ("copy", "exempt", "key", "name", "owner", "seen", "version")

    def __init__(self, name: str, owner: dict[str, Tensor | None], key: str, tensor: Tensor) -> None:
        self.name, self.owner, self.key = name, owner, key
        self.seen: Tensor | None = tensor
        self.copy = tensor.detach().clone()
        self.version = tensor._version
        # A buffer born with infinities (an attention mask) is no statistic: it is never judged.
        self.exempt = not tensor.is_floating_point() or not bool(tensor.isfinite().all())

    @property
    def tensor(self) -> Tensor | None:
        return self.owner.get(self.key)

    def comparable(self) -> bool:
        tensor = self.tensor
        return tensor is not None and tensor.shape == self.copy.shape and tensor.device == self.copy.device

    def moved(self) -> bool:
        tensor = self.tensor
        return tensor is not self.seen or (tensor is not None and tensor._version != self.version)


@final
class _Module:
    """The buffers of one module: they are written together, so they are live or quiet together."""

    __slots__ = ("live", "slots")

    def __init__(self, slots: list[_Slot]) -> None:
        self.slots = slots
        self.live = True

    def awake(self) -> bool:
        if not self.live:
            self.live = any(slot.moved() for slot in self.slots)
        return self.live


@final
class Buffers:
    """All buffers of a model. `remember` before the forward pass, `put_back` when its step is refused."""

    def __init__(self, model: nn.Module, *, enabled: bool = True) -> None:
        self._modules = list(_modules_with_buffers(model)) if enabled else []

    def _live_slots(self) -> Iterator[_Slot]:
        return (slot for module in self._modules if module.awake() for slot in module.slots)

    def remember(self) -> None:
        """Copy what may be written next: one fused copy for all live buffers."""
        if self._modules:
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        targets, sources = [], []
        for slot in self._live_slots():
            tensor = slot.tensor
            slot.seen = tensor
            if tensor is None:
                continue
            slot.version = tensor._version
            if slot.comparable():
                targets.append(slot.copy)
                sources.append(tensor.detach())
            else:
                slot.exempt = slot.exempt or tensor.shape != slot.copy.shape  # a cache that grows is no statistic
                slot.copy = tensor.detach().clone()
        if targets:
            torch._foreach_copy_(targets, sources)

    def suspects(self) -> tuple[list[str], list[Tensor]]:
        """Live floating-point buffers, to be looked at for NaN and infinity."""
        names: list[str] = []
        tensors: list[Tensor] = []
        if not self._modules:
            return names, tensors
        for slot in self._live_slots():
            tensor = slot.tensor
            if not slot.exempt and tensor is not None and slot.comparable():
                names.append(slot.name)
                tensors.append(tensor.detach())
        return names, tensors

    def probe(self, step: int) -> list[Tensor]:
        """At probe steps: for each module a flag on the device, whether any buffer differs from its copy."""
        if not self._modules or (step & (step - 1) and step % _PROBE_EVERY):
            return []
        return [torch.stack([_differs(slot) for slot in m.slots]).any() for m in self._modules]

    def learn(self, differs: Sequence[float]) -> None:
        """What the probe showed: a module none of whose buffers differ goes quiet."""
        for module, flag in zip(self._modules, differs, strict=True):
            module.live = flag != 0.0

    @torch.no_grad()
    def put_back(self) -> None:
        """The refused forward pass leaves no trace here."""
        for slot in self._live_slots():
            if slot.seen is not None:
                slot.owner[slot.key] = slot.seen
                slot.seen.copy_(slot.copy)
                slot.version = slot.seen._version


def _modules_with_buffers(model: nn.Module) -> Iterator[_Module]:
    taken: set[int] = set()
    for prefix, module in model.named_modules():
        slots = []
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in taken:
                taken.add(id(tensor))
                name = f"{prefix}.{key}" if prefix else key
                slots.append(_Slot(name.replace("_orig_mod.", ""), module._buffers, key, tensor))
        if slots:
            yield _Module(slots)


def _differs(slot: _Slot) -> Tensor:
    tensor = slot.tensor
    if tensor is None or not slot.comparable():
        return torch.ones((), dtype=torch.bool, device=slot.copy.device)
    return (tensor.detach() != slot.copy).any()
