"""What must be the same when a block's forward pass is run a second time, and is not by itself.

Buffers: BatchNorm would move its running statistics twice, and a layer whose output depends on a buffer that it writes
(spectral norm, say) would compute something else. So the second run works on copies of what the first one saw, and they
are thrown away. Random numbers: torch repeats them, but not where torch.compile has traced the checkpoint and a backend
other than inductor runs it. Whether a block does either is learned in its first pass in each mode.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

Place = tuple[dict[str, Tensor | None], str]
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
    def _first(self, places: dict[str, Place], before: dict[str, Tensor]) -> Iterator[None]:
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

    def _places(self) -> Iterator[tuple[str, Place]]:
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

    def __init__(self, places: dict[str, Place], before: dict[str, Tensor]) -> None:
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


def _now(place: Place) -> Tensor:
    owner, key = place
    tensor = owner[key]
    assert tensor is not None
    return tensor
