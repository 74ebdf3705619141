"""Rolling back when no state in memory can be used: to the newest checkpoint of this run that is finite."""

from collections.abc import Mapping
from typing import final

from steadystep import state
from steadystep.errors import SteadystepError
from steadystep.recovery.checkpoint import Checkpoint
from steadystep.recovery.checkpointing import Checkpointing
from steadystep.recovery.loop_state import LoopState
from steadystep.recovery.recovery import Recovery


@final
class FromDisk:
    """Called, it restores weights, buffers, optimizer, kept objects and the guard's own parts; None without a state.

    The place in the data, the random numbers and a learning rate that no kept scheduler sets stay where they are.
    """

    def __init__(
        self,
        checkpoints: Checkpointing | None,
        loop: LoopState,
        parts: Mapping[str, state.Stateful],
        memory: Recovery,
    ) -> None:
        self._checkpoints = checkpoints
        self._loop = loop
        self._parts = parts
        self._memory = memory

    def __call__(self) -> Checkpoint | None:
        """In a distributed run all ranks call it."""
        found = None if self._checkpoints is None else self._checkpoints.newest_of_this_run()
        if found is None:
            return None
        try:
            self._loop.roll_back(found.state)
        except SteadystepError:  # it does not fit: nothing was changed
            return None
        state.load(self._parts, found.state["guard"])
        self._memory.forget()
        return found
