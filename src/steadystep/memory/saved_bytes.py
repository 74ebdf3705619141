"""How much memory a forward pass holds for the backward pass, counted with torch's hooks for saved tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from steadystep.buffers import Buffers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Held from the end of forward until backward; on top of it backward holds one block's activations at a time."""

    without: int
    with_checkpoints: int

    @property
    def saved(self) -> int:
        """Bytes that checkpointing does not hold."""
        return self.without - self.with_checkpoints

    def __str__(self) -> str:
        share = self.saved / self.without if self.without else 0.0
        return (
            f"{_readable(self.with_checkpoints)} saved for backward with checkpointing, "
            f"{_readable(self.without)} without: {share:.0%} less"
        )


def count_saved(model: nn.Module, run: Callable[[], object]) -> int:
    """Bytes of memory saved for backward by `run`, each piece of memory once, weights and buffers left out."""
    ours = {_key(t) for t in (*model.parameters(), *model.buffers()) if _has_storage(t)}
    sizes: dict[tuple[torch.device, int], int] = {}
    kept: list[Tensor] = []  # why: memory that is freed and given out again would be counted as the same piece

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        if not _has_storage(tensor):
            sizes[tensor.device, -len(kept)] = tensor.nbytes
        elif _key(tensor) not in ours:
            sizes[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    buffers = Buffers(model)
    with _random_state_kept(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        try:
            run()
        finally:
            buffers.put_back()
    return sum(sizes.values())


def _random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    used = {p.device for p in model.parameters() if p.device.type != "cpu"}
    kind = next((device.type for device in used), "cuda")
    return torch.random.fork_rng([device.index or 0 for device in used if device.type == kind], device_type=kind)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _key(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _readable(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} GiB"
