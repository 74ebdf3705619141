"""States of a run kept in memory, to go back to.

A preallocated ring: each state costs what the optimizer's parameters, their moments and the buffers take (12 bytes per
parameter for Adam in fp32). States of a model on an accelerator live in pinned host memory. How often one is taken
follows from what copying costs: at most `time_share` of the time that training itself takes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor

from steadystep.accumulation.recipe import RngState
from steadystep.notices import warn
from steadystep.recovery.holdings import Holdings, Key
from steadystep.recovery.ring import to_replace

_LONGEST = 200  # steps between two states, whatever they cost: more would be lost by going back than won by not copying


class Kept(Protocol):
    """Anything with a state that should go back together with the weights."""

    def state_dict(self) -> Any:
        """Its state."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Back to `state`."""
        ...


@final
@dataclass(slots=True)
class Snapshot:
    """One remembered state, as it was after the update of `step`."""

    step: int
    updates: int
    lr: float
    tensors: dict[Key, Tensor]
    numbers: dict[str, Any]
    parts: dict[str, Any]
    """State of the guard's own parts."""
    kept: dict[str, Any]
    rng: RngState
    witness: Any = field(default=None)


@final
class Snapshots:
    """Takes states and gives them back. Which one is to be trusted is not decided here."""

    def __init__(
        self,
        holdings: Holdings,
        *,
        count: int,
        device: torch.device,
        min_interval: int = 20,
        time_share: float = 0.005,
        memory_bytes: float = float("inf"),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._holdings = holdings
        self._count = count
        self._device = device
        self._min_interval = min_interval
        self._time_share = time_share
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._states: list[Snapshot] = []
        self._kept: dict[str, Kept] = {}
        self._last_step = 0
        self._last_taken = 0.0
        self._step_s = self._copy_s = float("inf")
        self.interval = min_interval
        """Steps between two states."""

    @property
    def states(self) -> tuple[Snapshot, ...]:
        """Oldest first."""
        return tuple(self._states)

    def keep(self, name: str, thing: Kept) -> None:
        """Let `thing` go back together with the weights."""
        self._kept[name] = thing

    def due(self, step: int) -> bool:
        """Time for another one."""
        return self._count > 0 and (not self._states or step - self._last_step >= self.interval)

    def take(
        self, *, step: int, updates: int, lr: float, parts: Mapping[str, Any], suspected_since: int | None = None
    ) -> None:
        """Remember the state as it is now; not in the place of the last one before `suspected_since`."""
        started = self._clock()
        live = self._holdings.tensors()
        if not self._states and not self._affordable(live):
            return
        buffers = self._slot(step, live, suspected_since)
        torch._foreach_copy_(list(buffers.values()), list(live.values()))
        self._states.append(
            Snapshot(
                step=step,
                updates=updates,
                lr=lr,
                tensors=buffers,
                numbers=self._holdings.numbers(),
                parts=dict(parts),
                kept={name: _copied(thing.state_dict()) for name, thing in self._kept.items()},
                rng=RngState(self._device),
            )
        )
        self._set_interval(step, started)

    def go_back(self, step: int, *, replay: bool) -> Snapshot:
        """Restore the state of `step` and forget all younger ones. `replay` also restores torch's random numbers."""
        state = next(s for s in self._states if s.step == step)
        self._holdings.put_back(state.tensors, state.numbers)
        for name, saved in state.kept.items():
            if name in self._kept:
                self._kept[name].load_state_dict(_copied(saved))
        if replay:
            state.rng.restore()
        self._states = [s for s in self._states if s.step <= step]
        return state

    def moments_back(self, step: int) -> None:
        """Restore the optimizer's state of `step`; weights stay."""
        state = next(s for s in self._states if s.step == step)
        self._holdings.put_back(state.tensors, state.numbers, moments_only=True)

    def forget(self) -> None:
        """Drop all states: they belong to weights that were replaced."""
        self._states = []
        self._last_step = 0

    def _slot(self, step: int, live: dict[Key, Tensor], suspected_since: int | None) -> dict[Key, Tensor]:
        """Memory for the next state: that of the one it replaces, where shapes allow."""
        old: dict[Key, Tensor] = {}
        if len(self._states) >= self._count:
            steps = [state.step for state in self._states]
            which = to_replace(steps, now=step, interval=self.interval, suspected_since=suspected_since)
            old = self._states.pop(which).tensors
        return {key: _room(tensor, old.get(key)) for key, tensor in live.items()}

    def _affordable(self, live: dict[Key, Tensor]) -> bool:
        # why 3: Adam's moments appear with the first update, after this is asked
        parameters = sum(t.numel() * t.element_size() for (kind, _, _), t in live.items() if kind == "parameter")
        needed = max(3 * parameters, sum(t.numel() * t.element_size() for t in live.values()))
        affordable = int(min(self._memory_bytes / max(needed, 1), self._count))
        if affordable < self._count:
            rest = f"{affordable} instead of {self._count}" if affordable else "none, so there is no rolling back"
            warn(
                f"a snapshot of this run takes {needed / 2**30:.2f} GiB and recovery.snapshot_memory_gb allows "
                f"{self._memory_bytes / 2**30:.2f}: {rest}"
            )
        self._count = affordable
        return affordable > 0

    def _set_interval(self, step: int, started: float) -> None:
        """From what a copy takes and what a step takes, the fastest of each: pauses of the machine do not count."""
        now = self._clock()
        if len(self._states) > 1:  # the first copies allocate
            self._copy_s = min(self._copy_s, now - started)
        if step > self._last_step and self._last_taken:
            self._step_s = min(self._step_s, (started - self._last_taken) / (step - self._last_step))
            needed = min(self._copy_s, now - started) / max(self._time_share * self._step_s, 1e-12)
            self.interval = max(self._min_interval, min(int(needed) + 1, _LONGEST))
        self._last_step, self._last_taken = step, now


def _room(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
        return old
    if tensor.device.type == "cpu":
        return torch.empty_like(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(value) for value in state) if type(state) in (list, tuple) else state
    return state
