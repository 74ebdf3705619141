"""A refused step of any optimizer leaves weights and state at their bits, and torch's schedulers where they were.

Torch's own optimizers leave a parameter without a gradient alone, so a step without gradients is no step. Others count
in their groups, turn a missing gradient into zeros and move by their momentum, keep moments in attributes, or wrap
another optimizer. They step over zeros, and what they did is undone: one copy of weights and state, only then.
"""

import copy
import gc
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadystep._utils.modules import TensorCopy
from steadystep._utils.rng import RngState, generator_back
from steadystep.optimizers import each_of

_QUIET = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    )
)
_HOOKS = "_optimizer_"  # how torch names the hooks of an optimizer
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
_SKIPPED = (nn.Module, types.FunctionType, types.MethodType, types.ModuleType, type)


def is_quiet(optimizer: Optimizer) -> bool:
    """Whether a step without gradients is known to change nothing. A subclass may do as it likes."""
    return type(optimizer) in _QUIET or getattr(optimizer, "stands_still", False) is True


@final
class Undo:
    """Everything an optimizer may change in a step, as it is now: weights, state, groups, its other attributes.

    It is put back in place, so that whoever holds a tensor of it (a compiled model, a wrapper) goes on with it.
    """

    def __init__(self, optimizer: Optimizer, *, rng: bool = False) -> None:
        self._optimizer = optimizer
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._tensors: list[TensorCopy] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[Callable[[], Any]] = []
        self._held: list[tuple[Any, Any]] = []
        self._rng = RngState(self._weights[0].device) if rng and self._weights else None
        self._module = type(optimizer).__module__
        seen: dict[int, Any] = {}
        waiting: list[Any] = [optimizer]
        while waiting:
            thing = waiting.pop()
            if id(thing) not in seen:
                seen[id(thing)] = thing
                waiting.extend(self._keep(thing))

    @property
    def needed(self) -> bool:
        """A weight is not finite."""
        norms = torch._foreach_norm([p.detach() for p in self._weights], torch.inf)
        return not bool(torch.stack([norm.float() for norm in norms]).isfinite().all())  # sync: per step of LBFGS

    @property
    def moved(self) -> bool:
        """Something is no longer what it was."""
        # sync: in the first steps with a closure
        return any(kept.differs for kept in self._tensors) or any(_changed(*pair) for pair in self._held)

    @torch.no_grad()
    def back(self) -> None:
        """As if the step had not been taken; without gradients."""
        for thing, kept in self._held:
            _refill(thing, kept)
        for copy_of in self._tensors:
            copy_of.write()
        for array, value in self._arrays:
            array[...] = value
        for restore in self._generators:
            restore()
        for parameter in self._weights:
            parameter.grad = None
        if self._rng is not None:
            self._rng.restore()

    def _keep(self, thing: Any) -> Iterator[Any]:
        """Remember one thing; what it holds comes next."""
        if isinstance(thing, Tensor):
            self._tensors.append(TensorCopy(thing))
        elif isinstance(thing, np.ndarray):
            self._arrays.append((thing, thing.copy()))
        elif (restore := generator_back(thing)) is not None:
            self._generators.append(restore)
        elif isinstance(thing, dict | list | set | deque):
            self._held.append((thing, copy.copy(thing)))
            yield from thing.values() if isinstance(thing, dict) else thing
        elif isinstance(thing, tuple):
            yield from thing
        elif self._is_own(thing):
            own = _attributes(thing)
            self._held.append((thing, own))
            yield from own.values()

    def _is_own(self, thing: Any) -> bool:
        """An optimizer inside the optimizer, or a helper written beside it; not the trainer it may know."""
        if isinstance(thing, (*_PLAIN, *_SKIPPED)):
            return False
        return isinstance(thing, Optimizer) or (type(thing).__module__ == self._module and hasattr(thing, "__dict__"))


def _refill(thing: Any, kept: Any) -> None:
    if isinstance(thing, list | deque):
        thing.clear()
        thing.extend(kept)
    elif isinstance(thing, dict | set):
        thing.clear()
        thing.update(kept)
    else:
        held = vars(thing)
        for name in [name for name in held if name not in kept and not name.startswith(_HOOKS)]:
            del held[name]
        held.update(kept)


def _changed(thing: Any, kept: Any) -> bool:
    """Whether it holds other things than it held; what they hold is looked at by itself."""
    now = thing if isinstance(thing, dict | list | set | deque) else _attributes(thing)
    if len(now) != len(kept):
        return True
    if isinstance(now, dict):
        return any(key not in now or _differ(now[key], value) for key, value in kept.items())
    return not isinstance(now, set) and any(map(_differ, now, kept))


def _differ(now: Any, then: Any) -> bool:
    return now is not then and not (isinstance(then, _PLAIN) and now == then)


def _attributes(thing: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(thing).items() if not key.startswith(_HOOKS)}


def loss_is_finite(loss: Any, optimizer: Optimizer) -> bool:
    """One evaluation of a closure: its loss and all gradients."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    numbers = [norm.float() for norm in torch._foreach_norm(grads, torch.inf)] if grads else []
    if isinstance(loss, Tensor):
        numbers.append(loss.detach().reshape(()).float())
    return bool(torch.stack(numbers).isfinite().all()) if numbers else True  # sync: per evaluation of LBFGS


_WALKS = 4  # then all that there are have been found; an fp16 run refuses its first steps by routine


@final
class Schedulers:
    """Those that set the learning rate of one optimizer. One without `last_epoch` is told by the loop where it is."""

    def __init__(self, optimizer: Optimizer, given: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self.known: list[Any] = [*given]
        self._places: list[int | None] = []
        self._before: list[int | None] = []
        """Where they were when the step at hand began."""
        self._moving: list[bool] = []
        self._held: list[Any] | None = None
        self._groups: list[dict[str, Any]] = []
        self._walks = 0
        self.find()

    def find(self) -> list[Any]:
        """Those made since without telling us: a walk over all objects (0.03 s), at first and when in trouble."""
        self._walks += 1
        before = len(self.known)
        kinds = set(_kinds(LRScheduler))
        for thing in [thing for thing in gc.get_objects() if type(thing) in kinds]:
            if any(_of(thing) is each for each in each_of(self._optimizer)) and not self._knows(thing):
                self.known.append(thing)
        return self.known[before:]

    def before_step(self) -> None:
        """Who has moved since the last step; and back with those that moved after a refused one."""
        if not self.known:
            return
        self._before = places = self._now()
        pairs = zip(places, self._places, strict=False)
        self._moving = [now != then for now, then in pairs] + [True] * (len(places) - len(self._places))
        if self._held is not None:
            trios = zip(places, self._places, self._held, strict=False)
            if any(now != then for now, then, held in trios if held is not None):
                self._put_back(self._held)
            self._held = None

    def after_step(self, *, refused: bool) -> None:
        """The step is over; a refused one does not count for the schedule."""
        if not refused and not self.known:
            return
        if refused:
            if self._walks < _WALKS:
                self.find()
            moving = [*self._moving, *[True] * (len(self.known) - len(self._moving))]
            self._held = [
                copy.deepcopy(scheduler.state_dict()) if moves and _place(scheduler) is not None else None
                for scheduler, moves in zip(self.known, moving, strict=True)
            ]
            self._groups = [_settings(group) for group in self._optimizer.param_groups]
        self._places = self._now()

    def advance(self, count: int) -> None:
        """So many updates were replayed after a rollback: those that move with every step follow.

        One that stands where it stood has been put there: all updates since were replayed, or their batches are bad.
        """
        for scheduler, moves, before in zip(self.known, self._moving, self._before, strict=False):
            follows = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
            if moves and follows and _place(scheduler) != before:
                for _ in range(count):
                    scheduler.step()

    def _put_back(self, held: list[Any]) -> None:
        for scheduler, state in zip(self.known, held, strict=False):
            if state is not None:
                scheduler.load_state_dict(state)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=False):
            for key, value in settings.items():
                if isinstance(group.get(key), type(value)) and hasattr(value, "copy_"):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _now(self) -> list[int | None]:
        return [_place(scheduler) for scheduler in self.known]

    def _knows(self, thing: object) -> bool:
        return any(thing is scheduler for scheduler in self.known)


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    """A class and all below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _place(scheduler: Any) -> int | None:
    return getattr(scheduler, "last_epoch", None)


def _of(scheduler: LRScheduler) -> object:
    """Whose learning rate it sets; a wrapper of a framework may stand between."""
    optimizer: Any = vars(scheduler).get("optimizer")
    return vars(optimizer).get("optimizer", optimizer) if optimizer is not None else None


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a scheduler may set: the learning rate, and momentum in a cycle."""
    kept = {key: group[key] for key in ("lr", "momentum", "betas") if key in group}
    return {key: value.clone() if hasattr(value, "clone") else value for key, value in kept.items()}
