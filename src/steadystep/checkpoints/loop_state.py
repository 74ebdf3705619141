"""Everything a training loop owns, gathered for a file and put back."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steadystep._utils.rng import all_random_state, restore_all
from steadystep._utils.tensors import is_expanded, local_part
from steadystep._utils.text import plain_name, warn
from steadystep.checkpoints.atomic_io import FOLDER, Spread, laid_out, read_spread, room_for
from steadystep.checkpoints.data_position import check_place, check_random
from steadystep.checkpoints.finite import FINITE, FiniteParts, load_kept
from steadystep.checkpoints.fit import (
    FIT_ADVICE,
    check_buffers,
    check_optimizer,
    check_parameters,
    check_parts,
    owners,
)
from steadystep.checkpoints.packing import STAGE
from steadystep.errors import CheckpointError
from steadystep.optimizers import each_of, gather_state
from steadystep.parallel import Ranks, SingleProcess
from steadystep.state import KeptObject, check


class Position(Protocol):
    """Where the loop is in its data."""

    def saved(self) -> dict[str, Any]:
        """Plain values and tensors."""
        ...

    def seek(self, saved: Mapping[str, Any], *, random: dict[str, Any]) -> None:
        """Begin there, with these random numbers, when batches are asked for next."""
        ...


@final
class LoopState:
    """Parameters, buffers, optimizer, the guard's own memory, kept objects, random numbers, place in the data.

    `gather` gives live tensors, not copies. `put_back` checks everything it can before it changes anything.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        guard: KeptObject,
        position: Position,
        *,
        device: torch.device,
        ranks: Ranks | None = None,
        finite: FiniteParts | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._guard = guard
        self._position = position
        self._device = device
        self._ranks = ranks or SingleProcess()
        self._finite = finite or FiniteParts(model, lambda: ())
        self._kept: dict[str, KeptObject] = {}
        self._waiting: dict[str, Any] = {}
        """States of things that are not kept yet, by name."""
        self._warned = False
        self.verify: Callable[[], object] | None = None
        """Called before the state is read."""
        self._stage = "" if self._ranks.stages is None else self._ranks.stages.label
        self._left: list[str] = []
        """Buffers that a checkpoint has in another shape, and that the model makes itself."""

    def keep(self, name: str, thing: KeptObject, *, check: bool = False) -> None:
        """Save and restore `thing` too; one whose state was read before gets it now. With `check` it must be finite."""
        self._kept[name] = thing
        if check:
            self._finite.kept.add(name, thing)
        if name in self._waiting:
            load_kept(name, thing, self._waiting.pop(name))

    def gather(self) -> dict[str, Any]:
        """The state as it is, between two steps."""
        if self._waiting and not self._warned:
            self._warned = True
            names = ", ".join(map(repr, self._waiting))
            warn(
                f"the checkpoint contains a state of {names}, and nothing is registered under that name: see guard.keep"
            )
        if self.verify is not None:
            self.verify()
        self._ranks.reshard()
        gather_state(self._optimizer)
        own: dict[str, Any] = {"random": all_random_state(self._device), "data": self._position.saved()}
        own[FINITE] = self._finite.saved()
        own |= {STAGE: self._stage} if self._stage else {}
        if self._ranks.rank > 0:  # what all ranks have in common is written by the first one
            own |= {"buffers": self._buffers()}
            if self._ranks.sharded:
                own |= {"parameters": self._parameters(), "optimizer": self._optimizer.state_dict()}
            return own
        common = {
            "optimizer": self._optimizer.state_dict(),
            "guard": self._guard.state_dict(),
            "kept": {name: thing.state_dict() for name, thing in self._kept.items()},
        }
        return self.weights() | common | own | ({"ranks": self._ranks.size} if self._ranks.size > 1 else {})

    def weights(self) -> dict[str, Any]:
        """Parameters and buffers."""
        return {"parameters": self._parameters(), "buffers": self._buffers()}

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: all of it, or nothing.

        Raises:
            CheckpointError: it does not fit this program, on this rank or another one; nothing was changed.
        """
        self._ranks.reshard()
        self._all_agree(lambda: self._check(state))
        undo: list[Callable[[], object]] = []
        try:
            self._all_agree(lambda: self._load_around(state, undo))
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        # what comes now was checked, and copying cannot fail
        self.put_weights_back(state)
        self._position.seek(self._place(state), random=all_random_state(self._device))
        if self._left and self._ranks.rank == 0:
            names = ", ".join(self._left[:3]) + (f" and {len(self._left) - 3} more" if len(self._left) > 3 else "")
            warn(f"buffers with a different shape in the checkpoint keep this model's values: {names}")

    def _load_around(self, state: Mapping[str, Any], undo: list[Callable[[], object]]) -> None:
        """Everything but the weights, by code that is not ours; `undo` is told how to take each piece back."""
        undo.append(_optimizer_as_it_is(self._optimizer))
        self._load_optimizer(self._whole(state["optimizer"], state))
        before = self._guard.state_dict()
        undo.append(lambda: self._guard.load_state_dict(before))
        self._guard.load_state_dict(state["guard"])
        waiting = dict(state["kept"])
        for name, thing in self._kept.items():
            if name in waiting:
                undo.append(load_kept(name, thing, waiting.pop(name)))
        random = all_random_state(self._device)
        undo.append(lambda: restore_all(random, self._device))
        if state["random"] is None:  # a rank that the saved run did not have
            torch.manual_seed(torch.initial_seed() + self._ranks.rank)
        else:
            restore_all(state["random"], self._device)
        self._waiting = waiting

    def _all_agree(self, work: Callable[[], object]) -> None:
        """What one rank refuses, all refuse, with the same words."""
        wrong = ""
        try:
            work()
        except CheckpointError as error:
            wrong = str(error)
        except Exception as error:
            wrong = f"the checkpoint does not match ({type(error).__name__}: {error})"
        every = [text for text in self._ranks.texts(wrong) if text]
        if every:
            raise CheckpointError(every[0])

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """As `put_back`, for a run that goes on: its place in the data, random numbers and learning rates stay.

        With a kept scheduler the learning rates are rolled back with it.
        """
        self._ranks.reshard()
        self._check(state)
        rates = [group["lr"] for group in self._optimizer.param_groups]
        rates = [lr.detach().clone() if isinstance(lr, Tensor) else lr for lr in rates]
        self.put_weights_back(state)
        self._load_optimizer(self._whole(state["optimizer"], state))
        scheduled = any(isinstance(thing, LRScheduler) for thing in self._kept.values())
        for group, lr in zip(self._optimizer.param_groups, [] if scheduled else rates, strict=scheduled is False):
            group["lr"] = lr
        for name, thing in self._kept.items():
            if name in state["kept"]:
                thing.load_state_dict(state["kept"][name])

    @torch.no_grad()
    def put_weights_back(self, state: Mapping[str, Any]) -> None:
        """Parameters and buffers only."""
        self._ranks.reshard()
        parameters = self._parameters()
        spread = {name: saved for name, saved in state["parameters"].items() if isinstance(saved, Spread)}
        for name, parameter in parameters.items():
            if name not in spread:
                parameter.copy_(laid_out(state["parameters"][name], parameter))
        if spread:
            read_spread(Path(state[FOLDER]), {saved.name: parameters[name] for name, saved in spread.items()})
        for owner, key, name, module in owners(self._model):
            saved, present = state["buffers"].get(name), owner[key]
            if saved is None:
                if present is not None and key in module._non_persistent_buffers_set:
                    continue
                owner[key] = None
            elif present is None:
                owner[key] = saved.to(self._device, copy=True)
            elif is_expanded(present) and present.shape == saved.shape:  # it cannot be copied into
                owner[key] = saved.to(present, copy=True)
            elif local_part(present).shape == saved.shape:
                local_part(present).copy_(saved)

    def _place(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """In the data; as many ranks as saved it each used their own part of a pass."""
        data, saved, here = dict(state["data"]), int(state.get("ranks", 1)), self._ranks.size
        if saved != here:
            data["batch"] = int(data["batch"]) * saved // here
            if self._ranks.rank == 0:
                warn(
                    f"the checkpoint was written by {saved} ranks and this run has {here}: its data position is "
                    "approximate"
                )
        return data

    def _check(self, state: Mapping[str, Any]) -> None:
        check_parts(state)
        if state.get(STAGE, "") != self._stage:
            saved = state.get(STAGE) or "no pipeline"
            raise CheckpointError(f"the checkpoint is of {saved} and this rank runs {self._stage or 'no pipeline'}")
        check_parameters(state["parameters"], self._parameters())
        self._left = list(check_buffers(state["buffers"], self._model))
        check_optimizer(state["optimizer"], self._optimizer)
        if state["random"] is not None:
            check_random(state["random"])
        check_place(state["data"])
        check(self._guard.state_dict(), state["guard"])

    def _whole(self, saved: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state with what is spread over files read, in the layout of its parameters."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        wanted: dict[str, Tensor] = {}
        held: dict[Any, Any] = {}
        for number, slots in saved["state"].items():
            like = parameters[number] if isinstance(number, int) and number < len(parameters) else None
            held[number] = dict(slots)
            for name, value in slots.items():
                if isinstance(value, Spread):
                    held[number][name] = wanted[value.name] = room_for(value, like, self._device)
                elif isinstance(value, Tensor) and like is not None:
                    held[number][name] = laid_out(value, like)
        if wanted:
            read_spread(Path(state[FOLDER]), wanted)
        groups = [
            {**theirs, **{key: mine[key] for key in FIT_ADVICE if key in mine}}
            for theirs, mine in zip(saved["param_groups"], self._optimizer.param_groups, strict=True)
        ]
        return {**saved, "state": held, "param_groups": groups}

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(saved)
        # why: torch casts what it loads to the dtype of the parameter, also moments that were kept in fp32
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, held in saved["state"].items():
            if isinstance(number, int) and number < len(parameters):
                loaded = self._optimizer.state[parameters[number]]
                for name, value in held.items():
                    if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
                        loaded[name] = value.to(loaded[name].device, copy=True)

    def _parameters(self) -> dict[str, Tensor]:
        named = {plain_name(name): p.detach() for name, p in self._model.named_parameters()}
        ours = {id(p) for p in self._model.parameters()}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        others = [p for p in held if id(p) not in ours]
        return named | {f"optimizer parameter {i}": p.detach() for i, p in enumerate(others)}

    def _buffers(self) -> dict[str, Tensor]:
        found = {name: owner[key] for owner, key, name, _ in owners(self._model)}
        # why the part here: each rank writes its own buffers
        return {name: local_part(buffer).detach() for name, buffer in found.items() if buffer is not None}


def _optimizer_as_it_is(optimizer: Optimizer) -> Callable[[], object]:
    """To be called to take a load back: torch replaces both mappings and leaves the old ones as they were."""
    kept = [(each, each.state, each.param_groups) for each in each_of(optimizer)]
    options = [[dict(group) for group in groups] for _, _, groups in kept]

    def undo() -> None:
        for (each, state, groups), old_options in zip(kept, options, strict=True):
            for group, old in zip(groups, old_options, strict=True):
                group.clear()
                group.update(old)
            each.state, each.param_groups = state, groups

    return undo
