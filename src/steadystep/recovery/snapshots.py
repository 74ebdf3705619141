"""States of a run kept in memory, to go back to.

A preallocated ring: each state costs what the optimizer's parameters, their moments and the buffers take (12 bytes per
parameter for Adam in fp32). States of a model on an accelerator live in pinned host memory. How often one is taken
follows from its size and never from a clock: a rollback goes to what was kept, so the same program keeps the same
states on a busy machine and on an idle one.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from steadystep.dist import Alone, Ranks
from steadystep.notices import warn
from steadystep.recovery.holdings import Holdings, Key
from steadystep.recovery.ring import interval_mult, to_replace
from steadystep.rng import RngState


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
    largest_lr: float = 0.0
    """The largest learning rate in use until then."""


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
        memory_bytes: float = float("inf"),
        ranks: Ranks | None = None,
    ) -> None:
        self._holdings = holdings
        self._ranks = ranks or Alone()
        self._count = count
        self._device = device
        self._min_interval = min_interval
        self._memory_bytes = memory_bytes
        self._states: list[Snapshot] = []
        self._kept: dict[str, Kept] = {}
        self._last_step = 0
        self.interval = min_interval
        """Steps between two states; settled by the size of the first one."""

    @property
    def states(self) -> tuple[Snapshot, ...]:
        """Oldest first."""
        return tuple(self._states)

    def keep(self, name: str, thing: Kept) -> None:
        """Let `thing` go back together with the weights. States from before do not know it and are dropped."""
        self._kept[name] = thing
        self.forget()

    def due(self, step: int) -> bool:
        """Time for another one."""
        return self._count > 0 and (not self._states or step - self._last_step >= self.interval)

    def take(
        self,
        *,
        step: int,
        updates: int,
        lr: float,
        parts: Mapping[str, Any],
        largest_lr: float = 0.0,
        suspected_since: int | None = None,
    ) -> None:
        """Remember the state as it is now; not in the place of the last one before `suspected_since`."""
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
                largest_lr=largest_lr,
            )
        )
        self._last_step = step

    def go_back(self, step: int, *, replay: bool) -> Snapshot:
        """Restore the state of `step` and forget all younger ones. `replay` also restores torch's random numbers."""
        state = next(s for s in self._states if s.step == step)
        scheduled = any(isinstance(thing, LRScheduler) for thing in self._kept.values())
        self._holdings.put_back(state.tensors, state.numbers, learning_rates=scheduled)
        for name, saved in state.kept.items():
            if name in self._kept:
                self._kept[name].load_state_dict(_copied(saved))
        if replay:
            state.rng.restore()
        self._states = [s for s in self._states if s.step <= step]
        return state

    def schedules(self) -> Callable[[], None]:
        """To be called after `go_back`: puts kept schedulers, and their learning rates, where they are now."""
        kept = [(thing, _copied(thing.state_dict())) for thing in self._kept.values() if isinstance(thing, LRScheduler)]
        rates = [[group["lr"] for group in thing.optimizer.param_groups] for thing, _ in kept]

        def put_back() -> None:
            for (thing, saved), values in zip(kept, rates, strict=True):
                thing.load_state_dict(saved)
                for group, lr in zip(thing.optimizer.param_groups, values, strict=True):
                    group["lr"] = lr

        return put_back

    def weights_of(self, state: Snapshot) -> AbstractContextManager[None]:
        """The weights of that state for a while."""
        return self._holdings.with_weights(state.tensors, state.numbers)

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
        affordable = int(self._ranks.least(min(self._memory_bytes / max(needed, 1), self._count)))
        if affordable < self._count:
            rest = f"{affordable} instead of {self._count}" if affordable else "none, so there is no rolling back"
            warn(
                f"a snapshot of this run takes {needed / 2**30:.2f} GiB and recovery.snapshot_memory_gb allows "
                f"{self._memory_bytes / 2**30:.2f}: {rest}"
            )
        self._count = affordable
        # All ranks must keep the same steps, so the one with the largest part decides.
        size = -self._ranks.least(-float(needed))
        self.interval = interval_mult(size, affordable) * self._min_interval
        return affordable > 0


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
