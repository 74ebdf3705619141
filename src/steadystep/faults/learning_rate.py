"""A learning rate that somebody set wrong."""

import math
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from steadystep.faults.fault import Fault
from steadystep.faults.since import since


def scaled_lr(optimizer: Optimizer, *, steps: Container[int], factor: float) -> Fault:
    """The learning rate of every group times `factor`; `since(300)` as steps makes it last."""
    return _fault("scaled-lr", optimizer, steps, lambda _: factor)


def creeping_lr(optimizer: Optimizer, *, start: int, growth: float = 1.01) -> Fault:
    """From `start` on the learning rate is multiplied by `growth` once more with every step."""
    return _fault("creeping-lr", optimizer, since(start), lambda step: _grown(growth, step - start + 1))


def _grown(growth: float, steps: int) -> float:
    try:
        return growth**steps
    except OverflowError:
        return math.inf


def _fault(name: str, optimizer: Optimizer, steps: Container[int], factor: Callable[[int], float]) -> Fault:
    @contextmanager
    def changed(step: int) -> Iterator[None]:
        """Each group's rate is put back after the step, unless someone else has set another meanwhile."""
        groups = list(optimizer.param_groups)
        before = [group["lr"] for group in groups]
        during = [lr * factor(step) for lr in before]
        for group, lr in zip(groups, during, strict=True):
            group["lr"] = lr
        try:
            yield
        finally:
            # why: looked up again, because loading an optimizer's state makes new groups
            for group, old, set_lr in zip(optimizer.param_groups, before, during, strict=False):
                if group["lr"] is set_lr or group["lr"] == set_lr:
                    group["lr"] = old

    return Fault(name=name, steps=steps, around=changed)
