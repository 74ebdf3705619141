"""What there is to know about optimizers that torch has no word for; and several optimizers as one.

Muon for the matrices and AdamW for the rest, a generator's and its critic's: everything else in the package knows one
optimizer, with groups, a state and a `step`. `CombinedOptimizer` is one, over all of them: they step together or not at
all, and what is kept, restored or saved is so for all. Some optimizers hold others: their moments are in two places, or
elsewhere than one would look.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from steadystep.errors import CheckpointError, MisuseError

SET_BY_LOOPS = ("lr", "weight_decay", "momentum", "betas", "eps")
"""What a loop or its scheduler sets in a parameter group. The rest is the optimizer's: many count there."""

__all__ = [
    "SET_BY_LOOPS",
    "CombinedOptimizer",
    "Trained",
    "all_inside",
    "as_one",
    "each_of",
    "gather_state",
    "needs_closure",
    "own_state",
    "step",
    "zero_grad",
]


@final
class CombinedOptimizer(Optimizer):
    """Groups and state of all of them, in the order they were given. They stay usable by themselves."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # why not torch's own __init__: it would build groups from parameters, and these have theirs
        self.each = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Of all of them; a new list each time, with the groups themselves in it."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the first."""
        return self.each[0].defaults

    @property
    def state(self) -> "_States":  # type: ignore[override]
        """What is known about a parameter, by whichever of them holds it."""
        return _States(self.each)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """All of them, in their order."""
        for optimizer in self.each:
            step(optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """For all of them."""
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Nobody could say to which."""
        raise MisuseError("several optimizers: call add_param_group on the one that should hold the group")

    def state_dict(self) -> dict[str, Any]:
        """One state in torch's form, parameters numbered through; what only some of them save is kept by position."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        first = 0
        for position, optimizer in enumerate(self.each):
            saved = optimizer.state_dict()
            for key, value in saved["state"].items():
                state[key + first if isinstance(key, int) else f"{position} {key}"] = value
            groups += [{**group, "params": [i + first for i in group["params"]]} for group in saved["param_groups"]]
            others.append({key: value for key, value in saved.items() if key not in ("state", "param_groups")})
            first += _count(saved["param_groups"])
        return {"state": state, "param_groups": groups} | ({"others": others} if any(others) else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        groups, first = list(state_dict["param_groups"]), 0
        if len(groups) != len(self.param_groups):
            raise CheckpointError(
                f"the state has {len(groups)} parameter groups, the optimizers have {len(self.param_groups)}"
            )
        for position, optimizer in enumerate(self.each):
            own, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            count, mark = _count(own), f"{position} "
            state: dict[Any, Any] = {}
            for key, value in state_dict["state"].items():
                if isinstance(key, int) and first <= key < first + count:
                    state[key - first] = value
                elif isinstance(key, str) and key.startswith(mark):
                    state[key.removeprefix(mark)] = value
            numbered = [{**group, "params": [i - first for i in group["params"]]} for group in own]
            others = state_dict["others"][position] if "others" in state_dict else {}
            optimizer.load_state_dict({"state": state, "param_groups": numbered, **others})
            first += count

    def __repr__(self) -> str:
        return f"[{', '.join(type(optimizer).__name__ for optimizer in self.each)}]"


@final
class _States(Mapping[Any, Any]):
    """The states of several optimizers, looked at as one."""

    __slots__ = ("_each",)

    def __init__(self, each: Sequence[Optimizer]) -> None:
        self._each = each

    def __getitem__(self, key: Any) -> Any:
        for optimizer in self._each:
            if key in optimizer.state:
                return optimizer.state[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(key for optimizer in self._each for key in optimizer.state))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def as_one(given: Any) -> Any:
    """Return several optimizers as one, and whatever else as it is.

    Raises:
        MisuseError: none, one of them twice, something else among them, or a parameter that two of them hold.
    """
    if isinstance(given, Optimizer) or not isinstance(given, list | tuple):
        return given
    for position, optimizer in enumerate(given):
        if not isinstance(optimizer, Optimizer):
            raise MisuseError(f"optimizer {position} must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if any(optimizer is other for other in given[:position]):
            raise MisuseError(f"optimizer {position} is in the list twice")
    if len(given) < 2:
        if not given:
            raise MisuseError("no optimizer: pass one, or a list of those that are stepped together")
        return given[0]
    holder: dict[int, int] = {}
    for position, optimizer in enumerate(given):
        for parameter in _parameters(optimizer):
            if holder.setdefault(id(parameter), position) != position:
                names = " and ".join(type(given[i]).__name__ for i in (holder[id(parameter)], position))
                shape = "x".join(map(str, parameter.shape))
                raise MisuseError(
                    f"{names} both hold a parameter of shape [{shape}]: a parameter may be in one optimizer only"
                )
    return CombinedOptimizer(given)


def each_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return those that are one here; one by itself otherwise."""
    return optimizer.each if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without one, as with LBFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _count(groups: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


class Trained(Protocol):
    """Knows which parameters an optimizer holds now: groups come and go."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """All of them."""
        ...


def all_inside(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizer and those it holds as attributes: Lookahead's inner one, ZeRO's local one.

    >>> import torch
    >>> adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    >>> adam.inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    >>> [type(each).__name__ for each in all_inside(adam)]
    ['Adam', 'SGD']
    """
    seen: set[int] = set()
    return tuple([inner for each in each_of(optimizer) for inner in _walk(each, seen)])


def gather_state(optimizer: Optimizer) -> None:
    """Bring a state that is spread over ranks (ZeRO) together on the first of them; all ranks call this."""
    for each in each_of(optimizer):
        consolidate = getattr(each, "consolidate_state_dict", None)
        if consolidate is not None:
            consolidate(to=0)


def own_state(optimizer: Optimizer) -> Any:
    """Return the state for a file of this rank alone: of an optimizer that is spread over ranks, this rank's part."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return [inner.state_dict() for inner in all_inside(optimizer)[1:]]
    return optimizer.state_dict()


def _walk(optimizer: Optimizer, seen: set[int]) -> Iterator[Optimizer]:
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    yield optimizer
    for value in tuple(vars(optimizer).values()):
        for inner in _optimizers_in(value):
            yield from _walk(inner, seen)


def _optimizers_in(value: Any) -> tuple[Optimizer, ...]:
    if isinstance(value, Optimizer):
        return (value,)
    if isinstance(value, list | tuple) and value and isinstance(value[0], Optimizer):
        return tuple(each for each in value if isinstance(each, Optimizer))
    return ()


def step(of: Optimizer) -> None:
    """What `of.step()` does, without the profiler's range around it.

    The range costs 50 us per call on the host even where nobody profiles: 3 % of a small model's step. Whatever was put
    around the call by somebody else (a hook, a scheduler, a subclass, a patch) is found and called as usual.
    """
    function: Any = type(of).step
    if (
        getattr(function, "__code__", None) is not WRAPPER
        or "step" in of.__dict__  # a learning-rate scheduler counts its calls here
        or of._optimizer_step_pre_hooks
        or of._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    ):
        of.step()
    else:
        function.__wrapped__(of)


def zero_grad(of: Optimizer) -> None:
    """What `of.zero_grad()` does."""
    if type(of).zero_grad is not Optimizer.zero_grad or "zero_grad" in of.__dict__:
        of.zero_grad()
        return
    for group in of.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _wrapper() -> object:
    """The code that torch puts around `step`; where a version of torch has something else there, what nothing is."""
    made: Any = getattr(Optimizer, "profile_hook_step", lambda _: None)(lambda _: None)
    return made.__code__ if isinstance(made, FunctionType) and hasattr(made, "__wrapped__") else object()


WRAPPER = _wrapper()
"""The code object of it."""
