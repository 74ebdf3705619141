"""Micro-batches of a loop's own passes that could be run again, should something be wrong with one."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from steadystep.accumulation import Passes, Taped, Work
from steadystep.rng import RngState

Again = Callable[..., Tensor]


@final
class Reruns:
    """References only, from the forward pass to the step."""

    def __init__(self) -> None:
        self._all: list[tuple[Again | None, Any, RngState | None]] = []

    def add(self, again: Again | None, batch: Any, rng: RngState | None = None) -> None:
        """One more micro-batch of this step."""
        self._all.append((again, batch, rng))

    @property
    def batches(self) -> list[Any]:
        """What was given."""
        return [batch for _, batch, _ in self._all if batch is not None]

    def show(self, passes: Passes, works: Sequence[Work], bad: Sequence[int] = ()) -> None:
        """Present the first bad one, or the last: of what the loop has given, or else of what was seen of it."""
        known = self._all or [_rerun(work) for work in works]
        which = [i for i in bad if i < len(known)]
        if known:
            passes.present(*known[which[0] if which else -1])

    def clear(self) -> None:
        """The step is over."""
        self._all = []


def _rerun(work: Work) -> tuple[Again | None, Any, RngState | None]:
    recipe = work.recipe
    assert isinstance(recipe, Taped)
    args, kwargs, _ = recipe.batch
    batch = {"args": args, **kwargs} if kwargs else args
    return recipe.closure, args[0] if len(args) == 1 and not kwargs else batch, recipe.beginning
