"""Ranks as threads: what `torch.distributed` does between processes, done between threads of one."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

_Found = TypeVar("_Found")
_OFFSET = 10  # a rank of a group has another number among all processes


class UnreadableError(Exception):
    """A tensor on the meta device, which stands for an accelerator, holds no numbers."""


@dataclass
class Wire:
    """Where ranks leave a value and find those of all others."""

    size: int
    backend: str = "gloo"
    config: str = "cpu:gloo"
    left: dict[int, Any] = field(default_factory=dict)
    devices: list[torch.device] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60.0)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.left[rank] = value
        self.barrier.wait()
        every = [self.left[i] for i in range(self.size)]
        self.barrier.wait()
        return every


@dataclass(eq=False)
class Seat:
    """Stands for a process group as one rank sees it."""

    rank: int
    wire: Wire


class Distributed:
    """The part of `torch.distributed` that is used."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self) -> None:
        self._here = threading.local()

    def sit(self, seat: Seat) -> None:
        """The default group of this thread."""
        self._here.seat = seat

    def _seat(self, group: Seat | None) -> Seat:
        return self._here.seat if group is None else group

    def get_rank(self, group: Seat | None = None) -> int:
        return self._seat(group).rank

    def get_world_size(self, group: Seat | None = None) -> int:
        return self._seat(group).wire.size

    def get_backend(self, group: Seat | None = None) -> str:
        return self._seat(group).wire.backend

    def get_backend_config(self, group: Seat | None = None) -> str:
        return self._seat(group).wire.config

    def get_global_rank(self, group: Seat, rank: int) -> int:
        assert isinstance(group, Seat)
        return rank + _OFFSET

    def all_reduce(self, tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM, *, group: Seat | None) -> None:
        seat = self._seat(group)
        seat.wire.devices.append(tensor.device)
        if tensor.is_meta:
            raise UnreadableError
        every = torch.stack(seat.wire.exchange(seat.rank, tensor.clone()))
        tensor.copy_(every.amin(0) if op == torch.distributed.ReduceOp.MIN else every.sum(0))

    def all_gather(self, out: list[Tensor], tensor: Tensor, *, group: Seat | None) -> None:
        seat = self._seat(group)
        every = seat.wire.exchange(seat.rank, tensor.clone())
        assert len(out) == len(every)
        for place, value in zip(out, every, strict=True):
            place.copy_(value)

    def broadcast(self, tensor: Tensor, source: int, *, group: Seat | None) -> None:
        seat = self._seat(group)
        every = seat.wire.exchange(seat.rank, tensor.clone())
        tensor.copy_(every[source if group is None else source - _OFFSET])


def on_ranks(distributed: Distributed, wire: Wire, act: Callable[[Seat], _Found]) -> list[_Found]:
    """What each rank returns; the first error of any."""
    found: dict[int, _Found] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        seat = Seat(rank, wire)
        distributed.sit(seat)
        try:
            found[rank] = act(seat)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            wire.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(wire.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(wire.size)]


def alike(values: Sequence[Any]) -> Any:
    """What all ranks say, which is one thing."""
    assert len({repr(value) for value in values}) == 1, values
    return values[0]
