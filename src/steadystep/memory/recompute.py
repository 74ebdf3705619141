"""What must be the same when a block's forward pass is run a second time, and is not by itself.

Buffers: BatchNorm would move its running statistics twice, and a layer whose output depends on a buffer that it writes
(spectral norm, say) would compute something else. So the second run works on copies of what the first one saw, and they
are thrown away. Random numbers: torch repeats them, but not where torch.compile has traced the checkpoint and a backend
other than inductor runs it. Whether a block does either is learned in its first pass in each mode.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from steadystep.snapshots.buffers import Buffers

BufferPlace = tuple[dict[str, Tensor | None], str]
"""The dictionary a buffer is in, and its key."""


@final
@dataclass(frozen=True, slots=True)
class _Habits:
    written: frozenset[str]
    """Names of the buffers that the forward pass writes."""
    random: bool
    """It draws random numbers."""


@final
class SecondRun:
    """Contexts for the first and the second forward pass of one block."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._modules = list(block.named_modules())
        self._habits: dict[tuple[bool, ...], _Habits] = {}
        """By which of the modules are in training: a BatchNorm may be frozen alone."""
        self.harmless: dict[bool, bool] = {}
        """The same by the mode of the block, in a word: nothing to take care of."""

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Called by torch before the first pass."""
        places = dict(self._places())
        habits = self._habits.get(self._mode())
        watched = places if habits is None else habits.written
        before = {name: _now(place).detach().clone() for name, place in places.items() if name in watched}
        return self._first(places, before), _Rerun(places, before)

    @contextmanager
    def _first(self, places: dict[str, BufferPlace], before: dict[str, Tensor]) -> Iterator[None]:
        mode = self._mode()
        if mode in self._habits:
            yield
            return
        random = self._random_state()
        yield
        # sync: once per block and mode
        written = frozenset(name for name in places if not torch.equal(_now(places[name]), before[name]))
        drew = not all(torch.equal(a, b) for a, b in zip(random, self._random_state(), strict=True))
        self._habits[mode] = _Habits(written, drew)
        self.harmless[self._block.training] = not written and not drew
        for name in before.keys() - written:
            del before[name]

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for _, module in self._modules)

    def _places(self) -> Iterator[tuple[str, BufferPlace]]:
        for prefix, module in self._modules:
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    yield f"{prefix}.{key}", (module._buffers, key)

    def _random_state(self) -> list[Tensor]:
        devices = {p.device for p in self._block.parameters() if p.device.type != "cpu"}
        return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in devices)]


@final
class _Rerun:
    """Around each later pass (there is one per backward): the buffers as the first one saw them, for that long."""

    def __init__(self, places: dict[str, BufferPlace], before: dict[str, Tensor]) -> None:
        self._places, self._before = places, before
        self._held: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self._held = {name: _now(self._places[name]) for name in self._before}
        for name, tensor in self._before.items():
            owner, key = self._places[name]
            owner[key] = tensor.clone()

    def __exit__(self, *_: object) -> None:
        for name, tensor in self._held.items():
            owner, key = self._places[name]
            owner[key] = tensor


def _now(place: BufferPlace) -> Tensor:
    owner, key = place
    tensor = owner[key]
    assert tensor is not None
    return tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes saved for backward; in addition backward holds one block's activations at a time."""

    without: int
    """Bytes without checkpointing."""
    with_checkpoints: int
    """Bytes with checkpointing."""

    @property
    def saved(self) -> int:
        """Difference of the two."""
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
