"""The best weights of a run that keeps nothing on disk."""

from typing import Any, final

from torch import Tensor

from steadystep.recovery.loop_state import LoopState


@final
class BestWeights:
    """One copy of parameters and buffers, in host memory."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._state: dict[str, Any] | None = None

    def note(self) -> None:
        """These are the best so far."""
        self._state = {part: _copied(tensors) for part, tensors in self._loop.weights().items()}

    def put_back(self) -> bool:
        """False when there are none."""
        if self._state is None:
            return False
        self._loop.put_weights_back(self._state)
        return True


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
