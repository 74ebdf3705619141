"""A loader that is stuck."""

import copy
from collections.abc import Container
from typing import Any

from steadystep.errors import MisuseError
from steadystep.faults.fault import Fault
from steadystep.faults.steps import WithEves


def stale_batch(*, steps: Container[int]) -> Fault:
    """The batch of the step before comes again, and again for as long as the fault lasts.

    Ask for `fault.batch` at every step: the one before the first is kept, as a copy.

    >>> fault = stale_batch(steps={2, 3})
    >>> [fault.batch(step, f"batch {step}") for step in range(5)]
    ['batch 0', 'batch 1', 'batch 1', 'batch 1', 'batch 4']
    """
    kept: list[Any] = []

    def change(step: int, batch: Any) -> Any:
        if step not in steps:
            kept[:] = [copy.deepcopy(batch)]
            return batch
        if not kept:
            raise MisuseError(f"stale-batch at step {step}: no batch was seen at the step before")
        return kept[0]

    return Fault(name="stale-batch", steps=WithEves(steps), change_batch=change)
