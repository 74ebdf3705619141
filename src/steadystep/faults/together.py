"""Several faults as one, and a fault on one rank."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from steadystep.faults.fault import NO_FAULT, Fault
from steadystep.faults.steps import AnyOf, OnRank


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
