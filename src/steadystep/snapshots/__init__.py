"""Snapshots of a run kept in memory: what a rollback restores. Beside it: buffers, storage, and the replay buffer.

A preallocated ring: each state costs what the optimizer's parameters, their moments and the buffers take (12 bytes per
parameter for Adam in fp32). States of a model on an accelerator live in pinned host memory, those for which there is
no memory in files of the run's folder. How often one is taken follows from its size and never from a clock: a rollback
goes to what was kept, so the same program keeps the same states on a busy machine and on an idle one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from steadystep._utils.rng import RngState
from steadystep._utils.tree import copied, held_in, put_into
from steadystep.checkpoints.finite import bad_names
from steadystep.checkpoints.packing import pack
from steadystep.errors import MisuseError
from steadystep.parallel import Ranks, SingleProcess
from steadystep.snapshots.placement import to_replace
from steadystep.snapshots.storage import Rooms, SpillFile
from steadystep.snapshots.tensor_state import Key, Numbers, TensorState
from steadystep.state import KeptObject


@final
@dataclass(slots=True)
class Snapshot:
    """One remembered state, as it was after the update of `step`."""

    step: int
    updates: int
    lr: float
    tensors: dict[Key, Tensor]
    numbers: Numbers
    parts: dict[str, Any]
    """State of the guard's own parts."""
    kept: dict[str, Any]
    rng: RngState
    largest_lr: float = 0.0
    """The largest learning rate in use until then."""
    whole: bool = True
    """All of it is here: no other rank holds a part."""
    file: SpillFile | None = None
    """Where it is, if not in memory."""

    @property
    def second_moment(self) -> float | None:
        """The means of Adam's v, added up over the tensors; None where there are none, or other ranks hold a part."""
        held = [t for key, t in self.tensors.items() if key[0] == "state" and key[-1] == "exp_avg_sq" and t.numel()]
        if not held or not self.whole:
            return None
        return float(torch.stack([t.double().mean() for t in held]).sum())  # sync: only in trouble


@final
class Snapshots:
    """Takes states and gives them back. Which one is to be trusted is not decided here."""

    def __init__(
        self,
        tensor_state: TensorState,
        *,
        count: int,
        device: torch.device,
        min_interval: int = 20,
        memory_bytes: float = float("inf"),
        disk_bytes: float = 0.0,
        folder: Path | None = None,
        checkpoints: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._tensor_state = tensor_state
        self._device = device
        self._ranks = ranks or SingleProcess()
        self._states: list[Snapshot] = []
        self._passed_over: list[Snapshot] = []
        """Younger than what was restored: what updates that are replayed should lead to."""
        self._kept: dict[str, KeptObject] = {}
        self._updates: dict[str, Callable[[], object]] = {}
        self._last_step = 0
        self.pinned: int | None = None
        """The step of a state that no other one replaces."""
        self.next_step = 0
        """Before it no state is due."""
        self._rooms = Rooms(
            count=count,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            folder=folder,
            min_interval=min_interval,
            checkpoints=checkpoints,
            ranks=self._ranks,
        )

    @property
    def interval(self) -> int:
        """Steps between two states; settled by the size of the first one."""
        return self._rooms.interval

    @property
    def states(self) -> tuple[Snapshot, ...]:
        """Oldest first."""
        return tuple(self._states)

    def keep(self, name: str, thing: KeptObject, update: Callable[[], object] | None = None) -> None:
        """Let `thing` be rolled back together with the weights. States from before do not know it: `forget` them."""
        self._kept[name] = thing
        self._updates.pop(name, None)
        if update is not None:
            self._updates[name] = update

    def follow(self) -> None:
        """Update what follows the weights, as the loop does after each step."""
        for update in self._updates.values():
            update()

    @property
    def leaves_behind(self) -> bool:
        """Whether something that is kept holds tensors and cannot follow updates that are replayed."""
        others = [thing for name, thing in self._kept.items() if name not in self._updates]
        return any(True for thing in others for _ in held_in(thing.state_dict(), (Tensor, np.ndarray)))

    def due(self, step: int) -> bool:
        """Time for another one."""
        return self._rooms.count > 0 and (not self._states or step - self._last_step >= self.interval)

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
        self.settle()
        self.next_step = 0
        live = self._tensor_state.tensors()
        self._rooms.decide(live)
        if not self._rooms.count:
            return
        old = self._replaced(step, suspected_since)
        filled = self._rooms.fill(live, old, self._states)
        if filled is None:
            return
        tensors, file = filled
        self._states.append(
            Snapshot(
                step=step,
                updates=updates,
                lr=lr,
                tensors=tensors,
                numbers=self._tensor_state.numbers(),
                parts=dict(parts),
                kept={name: copied(thing.state_dict()) for name, thing in self._kept.items()},
                rng=RngState(self._device),
                largest_lr=largest_lr,
                whole=self._ranks.size == 1,
                file=file,
            )
        )
        self._last_step = step
        self.next_step = step + self.interval

    def roll_back(self, step: int, *, replay: bool) -> Snapshot:
        """Restore the state of `step` and forget all younger ones. `replay` also restores torch's random numbers."""
        state = next(s for s in self._states if s.step == step)
        scheduled = any(isinstance(thing, LRScheduler) for thing in self._kept.values())
        self._tensor_state.put_back(self._whole(state), state.numbers, learning_rates=scheduled)
        for name, saved in state.kept.items():
            if name in self._kept:
                self._kept[name].load_state_dict(copied(saved))
        if replay:
            state.rng.restore()
        self._passed_over += [s for s in self._states if s.step > step]
        self._states = [s for s in self._states if s.step <= step]
        return state

    def come_back(self, step: int) -> Snapshot:
        """Undo `roll_back`: restore the state of `step`, which it passed over, and know all of them again."""
        self._states, self._passed_over = [*self._states, *self._passed_over], []
        return self.roll_back(step, replay=False)

    def is_as_it_was(self, updates: int) -> bool:
        """Whether everything is as in the state with so many updates that `roll_back` passed over; True without one."""
        state = next((s for s in self._passed_over if s.updates == updates), None)
        return state is None or self._tensor_state.is_as_in(state.tensors, state.numbers)

    def settle(self) -> None:
        """Forget what `roll_back` passed over."""
        self._passed_over = []

    def schedules(self) -> Callable[[], None]:
        """To be called after `roll_back`: puts kept schedulers, and their learning rates, where they are now."""
        kept = [(thing, copied(thing.state_dict())) for thing in self._kept.values() if isinstance(thing, LRScheduler)]
        rates = [[copied(group["lr"]) for group in thing.optimizer.param_groups] for thing, _ in kept]

        def put_back() -> None:
            for (thing, saved), values in zip(kept, rates, strict=True):
                thing.load_state_dict(saved)
                for group, lr in zip(thing.optimizer.param_groups, values, strict=True):
                    group["lr"] = put_into(group["lr"], lr)

        return put_back

    def weights_of(self, state: Snapshot) -> AbstractContextManager[None]:
        """The weights of that state for a while."""
        return self._tensor_state.with_weights(state.tensors, state.numbers)

    def moments_back(self, step: int) -> None:
        """Restore the optimizer's state of `step`; weights stay."""
        state = next(s for s in self._states if s.step == step)
        self._tensor_state.put_back(self._whole(state), state.numbers, moments_only=True)

    def restore_kept(self, tensors: Sequence[str]) -> None:
        """Restore the kept objects that these tensors belong to, each from the newest state in which they are well."""
        if not tensors:
            return
        spoilt = [_spoilt_names(state.kept, tensors) for state in self._states]
        # why by tensor: averaged weights are often kept by one rank alone, and the others have to answer all the same
        good = iter(self._on_all_ranks([tensor not in bad for bad in spoilt for tensor in tensors]))
        well = [{tensor for tensor in tensors if next(good)} for _ in self._states]
        for name, thing in self._kept.items():
            own = set(filter(_begins_with(name), tensors))
            fit = [state for state, sound in zip(self._states, well, strict=True) if own <= sound]
            if own and fit:
                thing.load_state_dict(copied(fit[-1].kept[name]))

    def finite(self) -> list[Snapshot]:
        """States whose weights and optimizer's state hold no NaN and no infinity, on no rank."""
        good = self._on_all_ranks([self._tensor_state.are_finite(state.tensors) for state in self._states])
        return [state for state, is_good in zip(self._states, good, strict=True) if is_good]

    def _on_all_ranks(self, flags: Sequence[bool]) -> list[bool]:
        """Which of them are true everywhere: all ranks keep states of the same steps, and have to choose the same."""
        if not self._ranks.same([state.step for state in self._states]):  # other numbers of flags would never add up
            raise MisuseError(
                "the ranks hold snapshots of different steps: call guard.editing() on every rank or on none"
            )
        return [mean == 1.0 for mean in self._ranks.mean([float(flag) for flag in flags])] if flags else []

    def forget(self) -> None:
        """Drop all states: they belong to weights that were replaced."""
        self._states, self._passed_over = [], []
        self._last_step = self.next_step = 0

    def _replaced(self, step: int, suspected_since: int | None) -> Snapshot | None:
        """The state whose room the next one takes; none while there is room for another."""
        if len(self._states) < self._rooms.count:
            return None
        kept = [state for state in self._states if state.step == self.pinned] if len(self._states) > 2 else []
        others = [state for state in self._states if state not in kept]
        steps = [state.step for state in others]
        old = others[to_replace(steps, now=step, interval=self.interval, suspected_since=suspected_since)]
        self._states = [state for state in self._states if state is not old]
        return old

    def _whole(self, state: Snapshot) -> dict[Key, Tensor]:
        return self._rooms.whole(state.tensors, self._tensor_state.tensors())


def _begins_with(name: str) -> Callable[[str], bool]:
    """Whether a tensor belongs to that kept object."""
    return lambda tensor: tensor.startswith((f"kept.{name}.", f"kept.{name}["))


def _spoilt_names(kept: Mapping[str, Any], tensors: Sequence[str]) -> set[str]:
    """Those of `tensors` that hold no number which training comes to, in this state of the kept objects."""
    named = {name: kept[name] for name in kept if any(map(_begins_with(name), tensors))}
    held = pack({"kept": named}).tensors
    return set(bad_names({tensor: held[tensor] for tensor in tensors if tensor in held}, absurd=True))
