"""While a closure runs: it computes the loss, and nothing else of the update is its business.

A closure written for `optimizer.step(closure)` clears gradients, calls `backward` and sometimes `step`. Taken as it is,
gradients would count twice and weights would move before anybody has looked.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.errors import MisuseError

_TOUCHED = (
    "the closure called backward or zero_grad itself: return the loss, and leave backward, clipping, the step and "
    "zero_grad to the guard"
)


@final
class OnlyTheLoss:
    """A context around the closure; as cheap as two entries of a dictionary."""

    def __init__(self, optimizer: Optimizer, parameters: Callable[[], Sequence[Parameter]]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._step: Any = None
        self._marks: list[int | None] = []

    def __enter__(self) -> None:
        # why not a hook: it would stay, and torch steps more slowly with one
        self._step = self._optimizer.__dict__.get("step")
        self._optimizer.__dict__["step"] = _refuse
        self._marks = self._now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._step is None:
            del self._optimizer.__dict__["step"]
        else:
            self._optimizer.__dict__["step"] = self._step
        if kind is None and self._now() != self._marks:
            raise MisuseError(_TOUCHED)

    def _now(self) -> list[int | None]:
        """A gradient's counter moves when something is added to it; the first and the last stand for all."""
        parameters = self._parameters()
        return [None if p.grad is None else p.grad._version for p in (parameters[0], parameters[-1])]


def _refuse(*_: object, **__: object) -> NoReturn:
    raise MisuseError("the closure called optimizer.step itself: return the loss and leave the step to the guard")
