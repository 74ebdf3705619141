"""Everything a training loop owns, gathered for a file and put back."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.dist import Alone, Ranks
from steadystep.errors import CheckpointError, ConfigError
from steadystep.names import plain
from steadystep.notices import warn
from steadystep.recovery.snapshots import Kept
from steadystep.recovery.spread import FOLDER, Spread, laid_out, read_spread, room_for
from steadystep.rng import all_random_state, restore_all
from steadystep.state import check

_PARTS = ("parameters", "buffers", "optimizer", "guard", "kept", "random", "data")


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
        guard: Kept,
        position: Position,
        *,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._guard = guard
        self._position = position
        self._device = device
        self._ranks = ranks or Alone()
        self._kept: dict[str, Kept] = {}
        self._waiting: dict[str, Any] = {}
        """States of things that are not kept yet, by name."""
        self._warned = False

    def keep(self, name: str, thing: Kept) -> None:
        """Save and restore `thing` too; one whose state was read before gets it now."""
        self._kept[name] = thing
        if name in self._waiting:
            thing.load_state_dict(self._waiting.pop(name))

    def gather(self) -> dict[str, Any]:
        """The state as it is, between two steps."""
        if self._waiting and not self._warned:
            self._warned = True
            names = ", ".join(map(repr, self._waiting))
            warn(f"the checkpoint held a state of {names}, and nothing is kept by that name: see guard.keep")
        self._ranks.rest()
        own = {"random": all_random_state(self._device), "data": self._position.saved()}
        if self._ranks.rank > 0:  # what all ranks have in common is written by the first one
            spread = {"parameters": self._parameters(), "optimizer": self._optimizer.state_dict()}
            return own | {"buffers": self._buffers()} | (spread if self._ranks.sharded else {})
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
        """Continue from `state`.

        Raises:
            CheckpointError: it belongs to another model or optimizer; nothing was changed.
        """
        missing = [part for part in _PARTS if part not in state]
        if missing:
            raise CheckpointError(f"this is no checkpoint of a guarded loop: it lacks {', '.join(missing)}")
        self._ranks.rest()
        self._check(state)
        self.put_weights_back(state)
        self._load_optimizer(self._whole(state["optimizer"], state))
        self._guard.load_state_dict(state["guard"])
        self._waiting = dict(state["kept"])
        for name, thing in self._kept.items():
            if name in self._waiting:
                thing.load_state_dict(self._waiting.pop(name))
        random = state["random"]
        if random is None:  # a rank that the saved run did not have
            torch.manual_seed(torch.initial_seed() + self._ranks.rank)
            random = all_random_state(self._device)
        restore_all(random, self._device)
        self._position.seek(self._place(state), random=random)

    @torch.no_grad()
    def put_weights_back(self, state: Mapping[str, Any]) -> None:
        """Parameters and buffers only."""
        self._ranks.rest()
        parameters = self._parameters()
        spread = {name: saved for name, saved in state["parameters"].items() if isinstance(saved, Spread)}
        for name, parameter in parameters.items():
            if name not in spread:
                parameter.copy_(laid_out(state["parameters"][name], parameter))
        if spread:
            read_spread(Path(state[FOLDER]), {saved.name: parameters[name] for name, saved in spread.items()})
        for owner, key, name in self._owners():
            saved, present = state["buffers"].get(name), owner[key]
            if saved is None:
                owner[key] = None
            elif present is not None and present.shape == saved.shape and present.dtype == saved.dtype:
                present.copy_(saved)
            else:
                owner[key] = saved.to(self._device if present is None else present.device)

    def _place(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """In the data; as many ranks as saved it each used their own part of a pass."""
        data, saved, here = dict(state["data"]), int(state.get("ranks", 1)), self._ranks.size
        if saved != here:
            data["batch"] = int(data["batch"]) * saved // here
            if self._ranks.rank == 0:
                warn(
                    f"the checkpoint is of {saved} ranks and this run has {here}: its place in the data is approximate"
                )
        return data

    def _check(self, state: Mapping[str, Any]) -> None:
        try:
            check(self._guard.state_dict(), state["guard"])
        except ConfigError as error:
            raise CheckpointError(f"the checkpoint does not fit: {error}") from None
        present, saved = self._parameters(), state["parameters"]
        for name in [*saved, *present]:
            if name not in saved or name not in present:
                where = "this model has none" if name in saved else "the checkpoint has none"
                raise CheckpointError(f"the checkpoint does not fit: {name} is a parameter, and {where}")
            if saved[name].shape != present[name].shape:
                shapes = f"{list(saved[name].shape)} there and {list(present[name].shape)} here"
                raise CheckpointError(f"the checkpoint does not fit: {name} has the shape {shapes}")
        groups = state["optimizer"]["param_groups"]
        counts = [len(group["params"]) for group in groups]
        if counts != [len(group["params"]) for group in self._optimizer.param_groups]:
            raise CheckpointError(
                f"the checkpoint does not fit: its optimizer has parameter groups of {counts}, this one others; build "
                "it the same way"
            )
        mine, theirs = (set(group) - {"params", "initial_lr"} for group in (self._optimizer.param_groups[0], groups[0]))
        if mine != theirs:
            odd = ", ".join(sorted(mine ^ theirs))
            raise CheckpointError(f"the checkpoint is of another kind of optimizer: they differ in {odd}")

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
        return {**saved, "state": held}

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
        named = {plain(name): p.detach() for name, p in self._model.named_parameters()}
        ours = {id(p) for p in self._model.parameters()}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        others = [p for p in held if id(p) not in ours]
        return named | {f"optimizer parameter {i}": p.detach() for i, p in enumerate(others)}

    def _buffers(self) -> dict[str, Tensor]:
        found = {name: owner[key] for owner, key, name in self._owners()}
        return {name: buffer.detach() for name, buffer in found.items() if buffer is not None}

    def _owners(self) -> Iterator[tuple[dict[str, Tensor | None], str, str]]:
        """Also buffers that are not part of the model's own state_dict: a forward pass may write them."""
        for path, module in self._model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or buffer.layout is torch.strided:
                    yield module._buffers, key, plain(f"{path}.{key}" if path else key)
