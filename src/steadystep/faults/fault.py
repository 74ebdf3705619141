"""What a fault is: something that goes wrong at known steps, the same way every time.

Any loop can be broken on purpose with three words, and what is broken is mended when the step is over:

    with fault.at(step):
        guard.step(lambda batch: fault.loss(step, loss_fn(batch)), batch=fault.batch(step, batch))
"""

import hashlib
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
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


@final
@dataclass(frozen=True, slots=True)
class AnyOf:
    """Every step that is in one of the parts."""

    parts: tuple[Container[int], ...]

    def __contains__(self, step: object) -> bool:
        return any(step in part for part in self.parts)


@final
@dataclass(frozen=True, slots=True)
class WithEves:
    """The steps, and the one before each: for what needs to see the step before."""

    steps: Container[int]

    def __contains__(self, step: object) -> bool:
        return step in self.steps or (isinstance(step, int) and step + 1 in self.steps)


@final
@dataclass(frozen=True, slots=True)
class OnRank:
    """The steps on one rank of a distributed run, and none elsewhere. Without one, this process is rank 0."""

    steps: Container[int]
    rank: int

    def __contains__(self, step: object) -> bool:
        # why: asked anew each time, because faults may be made before the process group is
        return self.rank == _rank() and step in self.steps


def _rank() -> int:
    ranks = torch.distributed
    return ranks.get_rank() if ranks.is_available() and ranks.is_initialized() else 0


def since(start: int) -> range:
    """`start` and all that follow."""
    return range(start, sys.maxsize)


def draw(seed: int, step: int, what: str, count: int) -> int:
    """A number below `count`; `what` keeps two choices at one step apart.

    >>> draw(0, 500, "element", 10) == draw(0, 500, "element", 10)
    True
    """
    return _number(seed, step, what) % count


def permutation(seed: int, step: int, what: str, count: int) -> Tensor:
    """The numbers below `count` in another order, on the CPU; torch's own random numbers stay where they are."""
    rng = torch.Generator().manual_seed(_number(seed, step, what) >> 1)
    return torch.randperm(count, generator=rng)


def _number(seed: int, step: int, what: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{what}".encode()).digest()[:8], "big")


def together(faults: Sequence[Fault]) -> Fault:
    """All of them, each at its own steps, in the order given. None at all is `NO_FAULT`."""
    if len(faults) < 2:
        return faults[0] if faults else NO_FAULT

    def batch(step: int, seen: Any) -> Any:
        for fault in faults:
            seen = fault.batch(step, seen)
        return seen

    def loss(step: int, seen: Tensor) -> Tensor:
        for fault in faults:
            seen = fault.loss(step, seen)
        return seen

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault.at(step))
            yield

    return Fault(
        name=" + ".join(fault.name for fault in faults),
        steps=AnyOf(tuple(fault.steps for fault in faults)),
        change_batch=batch,
        change_loss=loss,
        around=around,
    )


def on_rank(fault: Fault, rank: int) -> Fault:
    """The fault on one rank of a distributed run only; the others go through the same steps unharmed."""
    return replace(fault, steps=OnRank(fault.steps, rank))
