"""Hearing of a loop's `loss.backward()`.

Torch has hooks for an optimizer's step, for a module's forward pass and for the gradient of a tensor one holds, but
none that says which tensor `backward` was called on. So while at least one watcher listens, `torch.Tensor.backward`
tells them before and after it does what it always did. With the last listener the attribute is what it was:
docs/adr/0004.
"""

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadystep.optimizers import each_of


class Listener(Protocol):
    """Who wants to know."""

    def hush(self) -> None:
        """Stop listening to the functions that the loop calls: backward is one too."""
        ...

    def before_backward(self, loss: Tensor, *, plainly: bool) -> None:
        """Gradients are about to be added; `plainly`: of one number, to all that led to it."""
        ...

    def after_backward(self, loss: Tensor | None) -> None:
        """They have been; None when it was not called on one real number."""
        ...


_LISTENERS: "list[weakref.ref[Any]]" = []  # why no WeakSet: to go through one costs as much as a norm
_made: dict[Callable[..., None], Callable[..., None]] = {}  # the newest one of ours, and what it stands in front of
_telling = threading.local()


def _told(plain: Callable[..., None]) -> Callable[..., None]:
    """What was there, torch's own method or somebody's wrapper of it, with a word to the listeners around it."""

    @functools.wraps(plain)
    def tell(self: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        listeners: list[Listener] = [listener for reference in _LISTENERS if (listener := reference()) is not None]
        for listener in listeners:
            listener.hush()
        # why: torch comes back here for what is inside a subclass; and somebody may have wrapped an older one of ours
        if torch.overrides.has_torch_function_unary(self) or getattr(_telling, "now", False):
            plain(self, gradient, *args, **kwargs)
            return
        plainly = gradient is None and not args and not kwargs.get("create_graph") and kwargs.get("inputs") is None
        for listener in listeners:
            listener.before_backward(self, plainly=plainly)
        _telling.now = True
        try:
            plain(self, gradient, *args, **kwargs)
        finally:
            _telling.now = False
        loss = self if gradient is None and self.numel() == 1 and self.is_floating_point() else None
        for listener in listeners:
            listener.after_backward(loss)

    backward: Callable[..., None] = torch.compiler.disable(tell)  # type: ignore[no-untyped-call]  # why: as torch's own
    _made.clear()
    _made[backward] = plain
    return backward


def _replaced() -> Callable[..., None] | None:
    """What ours stands in front of, where ours is the one that is called."""
    return _made.get(torch.Tensor.backward)


def listen_to_backward(listener: Listener) -> None:
    """Tell `listener` until `stop` is called with it, or it is gone."""
    _LISTENERS[:] = [reference for reference in _LISTENERS if reference() is not None]
    _LISTENERS.append(weakref.ref(listener))
    if _replaced() is None:
        torch.Tensor.backward = _told(torch.Tensor.backward)  # type: ignore[method-assign]


def stop_listening(listener: Listener) -> None:
    """Leave it alone. With the last one the method is what it was."""
    _LISTENERS[:] = [reference for reference in _LISTENERS if reference() not in (None, listener)]
    # why: somebody may have wrapped ours since; theirs is not ours to remove, and ours does nothing without listeners
    plain = _replaced()
    if not _LISTENERS and plain is not None:
        torch.Tensor.backward = plain  # type: ignore[method-assign]


_NORM, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"


@final
@dataclass(frozen=True, slots=True)
class Clip:
    """One call of it."""

    parameters: Sequence[Tensor]
    max_norm: float
    norm_type: float
    foreach: bool | None

    def __call__(self) -> None:
        """Once more, on the gradients as they are."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm, self.norm_type, foreach=self.foreach)


class Hearer(Protocol):
    """Who wants to know."""

    def clipped(self, clip: Clip, total_norm: Tensor) -> None:
        """Gradients were held down; their norm was `total_norm`."""
        ...


_HEARERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_plain: dict[str, Callable[..., Any]] = {}
_norm_type = 2.0


def _total(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    global _norm_type  # why: torch's two functions know of each other only through their caller
    _norm_type = float(norm_type)
    return _plain[_NORM](tensors, norm_type, *args, **kwargs)


def _scaled(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _plain[_SCALE](held, max_norm, total_norm, foreach)
    clip = Clip(held, float(max_norm), _norm_type, foreach)
    for hearer in tuple(_HEARERS):
        hearer.clipped(clip, total_norm)


def listen_to_clipping(hearer: Hearer) -> None:
    """Tell `hearer` until `stop` is called with it, or it is gone."""
    _HEARERS.add(hearer)
    found = {name: vars(clip_grad).get(name) for name in (_NORM, _SCALE)}
    if all(callable(function) for function in found.values()) and _scaled not in found.values():
        _plain.update({name: function for name, function in found.items() if function is not None})
        vars(clip_grad).update({_NORM: _total, _SCALE: _scaled})


def stop_hearing(hearer: Hearer) -> None:
    """Leave it alone. With the last one torch's functions are back."""
    _HEARERS.discard(hearer)
    if not _HEARERS and vars(clip_grad).get(_SCALE) is _scaled and vars(clip_grad).get(_NORM) is _total:
        vars(clip_grad).update(_plain)


_WALKS = 4  # then all that there are have been found; an fp16 run refuses its first steps by routine


@final
class Schedulers:
    """Those that set the learning rate of one optimizer. One without `last_epoch` is told by the loop where it is."""

    def __init__(self, optimizer: Optimizer, given: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self.known: list[Any] = [*given]
        self._places: list[int | None] = []
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
        places = self._now()
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
        """So many updates were made again after a rollback: those that move with every step follow."""
        for scheduler, moves in zip(self.known, self._moving, strict=False):
            if moves and isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
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
