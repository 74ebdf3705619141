"""Torch's schedulers beside a step that was refused: they stay where they were."""

import copy
import gc
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steadystep.optimizers import each_of

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
        """So many updates were replayed after a rollback: those that move with every step follow."""
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
