"""What a loop has gathered since its last step: losses, and the norms of the gradients before it touched them.

A gradient's version counter tells what happened to it at no cost: unchanged since the last backward pass, nobody
clipped it; changed between two backward passes, it was cleared and another group has begun; unchanged by a backward
pass, that pass was somebody else's (the other half of a GAN).
"""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor
from torch.nn import Parameter

_Marks = tuple[int | None, ...]


@final
class Collected:
    """Losses of the backward passes whose gradients the next step will use."""

    def __init__(self, parameters: Callable[[], Sequence[Parameter]], measure: Callable[[], list[Tensor]]) -> None:
        self._parameters = parameters
        self._measure = measure
        self._marks: _Marks | None = None
        self._before: _Marks = ()
        self._found: list[Tensor] = []
        self._given: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self.norms: list[Tensor] | None = None
        """Of each gradient at the end of the last backward pass, on the device, when `measuring`."""
        self.measuring = True
        """The loop clips by itself, or it is not known yet whether it does."""

    def before_backward(self) -> None:
        """Gradients that somebody changed since the last pass were cleared: what was gathered is void."""
        self._before = self._now()
        if self._before != self._marks:
            self._found, self._given, self.norms = [], [], None

    def after_backward(self, loss: Tensor | None) -> None:
        """One more pass, if it was one of ours."""
        now = self._now()
        if now == self._before:
            return
        self._marks = now
        if loss is not None:
            self._found.append(loss.detach().reshape(()))
        self._given += self._waiting
        self._waiting = []
        if self.measuring:
            self.norms = self._measure()

    def give(self, loss: Tensor) -> None:
        """The loop says it itself, before or after its backward pass."""
        self._waiting.append(loss.detach().reshape(()))

    @property
    def touched(self) -> bool:
        """The gradients were changed in place since the last backward pass that was heard of: the loop clips."""
        return self._marks is not None and self._now() != self._marks

    def losses(self, scale: Tensor | None) -> list[Tensor]:
        """Whose mean is the objective of this step: what was given, or the sum that backward was called on."""
        given = [*self._given, *self._waiting]
        if given:
            return given
        found = self._found if scale is None else [loss / scale for loss in self._found]
        return found if len(found) == 1 else [loss * len(found) for loss in found]

    @property
    def was_given(self) -> bool:
        """The losses are the loop's own words, not what it called backward on."""
        return bool(self._given or self._waiting)

    def clear(self) -> None:
        """The step is over."""
        self._found, self._given, self._waiting, self.norms = [], [], [], None
        self._marks = None

    def _now(self) -> _Marks:
        return tuple([None if p.grad is None else p.grad._version for p in self._parameters()])
