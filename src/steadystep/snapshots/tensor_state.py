"""Every tensor a training loop owns, as it is now: parameters, buffers, optimizer state."""

import copy
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.modules import TensorCopy
from steadystep._utils.rng import generator_back
from steadystep._utils.tensors import is_writable, local_part, spread_like
from steadystep._utils.text import plain_name
from steadystep._utils.tree import put_into, same_values
from steadystep.checkpoints.finite import bad_names
from steadystep.optimizers import SET_BY_LOOPS, Trained, all_inside

Key = tuple[Hashable, ...]
"""Kind, then whose it is, then its name."""

# Whoever schedules the learning rate owns it; recursive schedules of torch compute the next value from this one.
_SCHEDULED = ("lr", "initial_lr")


@final
@dataclass(frozen=True, slots=True)
class _Held:
    """What one optimizer keeps beside the tensors of its parameters."""

    optimizer: Optimizer
    slots: dict[int, dict[Any, Any]]
    """By parameter: what is no tensor."""
    common: dict[Any, Any]
    """State that belongs to no parameter."""
    own: "OwnValues"
    on_host: frozenset[tuple[int, Any]]
    """Tensors that stay on the host beside parameters of an accelerator, as Adam's counts of steps do."""


@final
class Numbers:
    """Optimizer state that is no tensor, what the groups hold, and who the parameters are."""

    __slots__ = ("groups", "held", "parameters")

    def __init__(self, optimizer: Optimizer, parameters: tuple[Parameter, ...]) -> None:
        self.parameters = parameters
        self.held = [_held(each, parameters) for each in all_inside(optimizer)]
        self.groups = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in _groups(optimizer)]

    def counts_as(self, other: "Numbers") -> bool:
        """Whether all counters are the same. What loops and schedulers set is theirs and does not count."""
        mine, theirs = (
            [{k: v for k, v in kept.items() if k not in SET_BY_LOOPS and k not in _SCHEDULED} for kept in each.groups]
            for each in (self, other)
        )
        own = [(held.slots, held.common, held.own.values) for held in self.held]
        return same_values(mine, theirs) and same_values(own, [(h.slots, h.common, h.own.values) for h in other.held])


@final
class TensorState:
    """Names the tensors, copies them out and copies them back. Frozen parameters do not change and are left out.

    Parameters are known by themselves and not by their place: groups may be added while a state is kept. What was not
    there yet is left as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        trained: Trained,
        *,
        infinite: Container[str] = (),
    ) -> None:
        """`infinite` names parameters that hold infinity on purpose."""
        self._infinite = {id(p) for name, p in model.named_parameters() if plain_name(name) in infinite}
        self._model = model
        self._optimizer = optimizer
        self._trained = trained

    def tensors(self) -> dict[Key, Tensor]:
        """What is copied: alive, not copies."""
        found: dict[Key, Tensor] = {}
        for parameter in self._trained.parameters:
            found["parameter", id(parameter)] = local_part(parameter).detach()
        for number, optimizer in enumerate(all_inside(self._optimizer)):
            for parameter in self._trained.parameters:
                for name, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found["state", id(parameter), number, name] = local_part(value).detach()
        for path, _, name, buffer in self._buffers():
            if buffer is not None and is_writable(buffer):
                found["buffer", path, name] = local_part(buffer).detach()
        return found

    def are_finite(self, tensors: dict[Key, Tensor]) -> bool:
        """Whether those of parameters and optimizer hold no NaN and no infinity that are not there on purpose."""
        weights = {str(key): t for key, t in tensors.items() if key[0] == "parameter" and key[1] not in self._infinite}
        moments = {str(key): t for key, t in tensors.items() if key[0] == "state"}
        return not bad_names(weights | moments, absurd=True)

    def numbers(self) -> Numbers:
        """What belongs to them and is no tensor, as a copy."""
        return Numbers(self._optimizer, tuple(self._trained.parameters))

    @torch.no_grad()
    def put_back(
        self,
        tensors: dict[Key, Tensor],
        numbers: Numbers,
        *,
        moments_only: bool = False,
        learning_rates: bool = False,
    ) -> None:
        """In place, so that whoever holds a reference (a compiled model, an EMA) sees the old values too.

        `learning_rates` puts those of the groups back too: for a scheduler that is rolled back as well.
        """
        for number, held in enumerate(numbers.held):
            _put_state_back(held, numbers.parameters, _slots(tensors, number))
        if moments_only:
            return
        for parameter in numbers.parameters:
            local_part(parameter).copy_(tensors["parameter", id(parameter)])
        for held in numbers.held:
            held.own.put_back()
        for group, saved in zip(_groups(self._optimizer), numbers.groups, strict=False):
            for key, value in saved.items():
                if learning_rates or key not in _SCHEDULED:
                    group[key] = put_into(group.get(key), value)
        for path, owner, name, buffer in self._buffers():
            kept_buffer = tensors.get(("buffer", path, name))
            if kept_buffer is None:
                continue
            if buffer is not None and _alike(local_part(buffer), kept_buffer):
                local_part(buffer).copy_(kept_buffer)
            else:
                owner[name] = kept_buffer.to(kept_buffer.device if buffer is None else buffer.device, copy=True)

    def is_as_in(self, tensors: dict[Key, Tensor], numbers: Numbers) -> bool:
        """Whether all is, bit for bit, as in a kept state.

        A single parameter may differ: then it was the kept state that something had changed from outside, or moments
        and losses would tell.
        """
        now = self.tensors()
        if now.keys() != tensors.keys():
            return False
        odd = [key for key, kept in tensors.items() if not same_values(now[key].to(kept.device), kept)]  # sync: trouble
        return len(odd) <= 1 and all(key[0] == "parameter" for key in odd) and self.numbers().counts_as(numbers)

    @contextmanager
    def with_weights(self, tensors: dict[Key, Tensor], numbers: Numbers) -> Iterator[None]:
        """The weights of a kept state inside, the present ones again afterwards. Costs one copy of them."""
        present = [TensorCopy(parameter) for parameter in numbers.parameters]
        try:
            with torch.no_grad():
                for parameter in numbers.parameters:
                    local_part(parameter).copy_(tensors["parameter", id(parameter)])
            yield
        finally:
            for copy_of in present:
                copy_of.write()

    def _buffers(self) -> Iterator[tuple[str, dict[str, Tensor | None], str, Tensor | None]]:
        for path, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                yield path, module._buffers, name, buffer


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of all that it holds, each once: a wrapper often shares them with what it wraps."""
    groups = [group for each in all_inside(optimizer) for group in each.param_groups]
    return list({id(group): group for group in groups}.values())


def _held(optimizer: Optimizer, parameters: Sequence[Parameter]) -> _Held:
    state: Mapping[Any, Any] = optimizer.state
    slots = {
        id(p): {n: _copied(v) for n, v in state[p].items() if not isinstance(v, Tensor)}
        for p in parameters
        if p in state
    }
    common = {key: _copied(value) for key, value in state.items() if not isinstance(key, Tensor)}
    on_host = frozenset(
        (id(p), name)
        for p in parameters
        if p.device.type != "cpu" and p in state
        for name, value in state[p].items()
        if isinstance(value, Tensor) and value.device.type == "cpu"
    )
    return _Held(optimizer, slots, common, OwnValues(optimizer), on_host)


def _slots(tensors: dict[Key, Tensor], number: int) -> dict[Any, dict[Any, Tensor]]:
    found: dict[Any, dict[Any, Tensor]] = {}
    for key, kept in tensors.items():
        if key[0] == "state" and key[2] == number:
            found.setdefault(key[1], {})[key[3]] = kept
    return found


def _put_state_back(held: _Held, parameters: Sequence[Parameter], tensors: dict[Any, dict[Any, Tensor]]) -> None:
    state: Any = held.optimizer.state
    for parameter in parameters:
        numbers = held.slots.get(id(parameter))
        if numbers is None:
            state.pop(parameter, None)
        else:
            _put_slots_back(state[parameter], tensors.get(id(parameter), {}), numbers, parameter, held.on_host)
    for key in [key for key in state if not isinstance(key, Tensor) and key not in held.common]:
        del state[key]
    state.update({key: _copied(value) for key, value in held.common.items()})


def _put_slots_back(
    held: dict[Any, Any],
    tensors: dict[Any, Tensor],
    numbers: dict[Any, Any],
    parameter: Parameter,
    on_host: Container[tuple[int, Any]],
) -> None:
    for name in held.keys() - tensors.keys() - numbers.keys():
        del held[name]
    held.update({name: _copied(value) for name, value in numbers.items()})
    for name, kept in tensors.items():
        now = held.get(name)
        if isinstance(now, Tensor) and _alike(local_part(now), kept):
            local_part(now).copy_(kept)
        elif (id(parameter), name) in on_host:
            held[name] = kept.clone()
        else:
            held[name] = spread_like(kept.to(parameter.device, copy=True), parameter)


def _alike(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


_MOST_ELEMENTS = 4096  # of a tensor, or items of a container: what is larger is no counter
_DEEPEST = 4
# Torch's own bookkeeping, what a scaler leaves there for the time of a step, and what is kept elsewhere.
_NOT_THEIRS = frozenset(
    ("state", "param_groups", "defaults", "step", "zero_grad", "grad_scale", "found_inf", "_step_supports_amp_scaling")
)


@final
class OwnValues:
    """What an optimizer holds on itself, as it is now: plain values, small tensors and generators."""

    __slots__ = ("_back", "_optimizer", "values")

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.values: dict[str, Any] = {}
        self._back: list[Callable[[], Any]] = []
        for name, value in vars(optimizer).items():
            if name in _NOT_THEIRS or name.startswith("_optimizer_"):
                continue
            generator = generator_back(value)
            if generator is not None:
                self._back.append(generator)
            elif _is_plain(value, _DEEPEST):
                self.values[name] = copy.deepcopy(value)

    @torch.no_grad()
    def put_back(self) -> None:
        """As they were. What appeared since stays."""
        held = vars(self._optimizer)
        held.update({name: put_into(held.get(name), kept) for name, kept in self.values.items()})
        for restore in self._back:
            restore()


def _is_plain(value: Any, depth: int) -> bool:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return True
    if isinstance(value, Tensor):
        # why no leaf: a parameter is not the optimizer's to keep
        return type(value) is Tensor and not value.requires_grad and value.numel() <= _MOST_ELEMENTS
    if depth == 0 or not isinstance(value, list | tuple | dict) or len(value) > _MOST_ELEMENTS:
        return False
    return all(_is_plain(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value))
