"""What a fault is: something that goes wrong at known steps, the same way every time.

Any loop can be broken on purpose with three words, and what is broken is mended when the step is over:

    with fault.at(step):
        guard.step(lambda batch: fault.loss(step, loss_fn(batch)), batch=fault.batch(step, batch))
"""

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor


def _same_batch(step: int, batch: Any) -> Any:
    return batch


def _same_loss(step: int, loss: Tensor) -> Tensor:
    return loss


def _nothing(step: int) -> AbstractContextManager[None]:
    return nullcontext()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Trouble at `steps`: whatever of the three is given. Computing the loss again within a step repeats the fault."""

    name: str
    steps: Container[int]
    """A range, a set: anything that knows whether a step is in it."""
    change_batch: Callable[[int, Any], Any] = _same_batch
    change_loss: Callable[[int, Tensor], Tensor] = _same_loss
    around: Callable[[int], AbstractContextManager[None]] = _nothing

    def batch(self, step: int, batch: Any) -> Any:
        """The batch that training sees. The one given is left as it is."""
        return self.change_batch(step, batch) if step in self.steps else batch

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """The loss that training sees."""
        return self.change_loss(step, loss) if step in self.steps else loss

    def at(self, step: int) -> AbstractContextManager[None]:
        """Goes around forward pass, backward pass and update of one step."""
        return self.around(step) if step in self.steps else nullcontext()


NO_FAULT = Fault(name="none", steps=())
"""For the twin that nothing happens to."""
