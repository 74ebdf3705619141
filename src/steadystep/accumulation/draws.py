"""Whether closures and optimizers draw random numbers, and whose: found out by looking, because none says so.

To keep the state of torch's generator costs a few microseconds at every step, of Python's twenty, of NumPy's three
hundred. So the first passes are looked at before and after, then one now and then, and what was drawn from once is kept
from there on.
"""

from typing import final

import torch

from steadystep.rng import RngState

_FIRST, _EVERY = 8, 256  # passes


@final
class Draws:
    """`before` and `after` each pass. A state is given where it is known, or still has to be found out, to matter."""

    __slots__ = ("_count", "_device", "_looked_at", "_numpy", "_python", "_torch")

    def __init__(self, device: torch.device, *, by_modules: bool) -> None:
        self._device = device
        self._torch, self._python, self._numpy = by_modules, False, False
        self._count = 0
        self._looked_at: RngState | None = None

    def before(self) -> RngState | None:
        """What the pass begins with."""
        self._count += 1
        if self._count <= _FIRST or self._count % _EVERY == 0:
            self._looked_at = RngState(self._device, python=True, numpy=True)
            return self._looked_at
        if self._torch or self._python or self._numpy:
            return RngState(self._device, python=self._python, numpy=self._numpy)
        return None

    def after(self, *, last: bool = False) -> None:
        """The pass is over; `last` says that its update is too."""
        if self._looked_at is not None:
            drawn, python, numpy = self._looked_at.moved()
            self._torch, self._python, self._numpy = self._torch or drawn, self._python or python, self._numpy or numpy
            self._looked_at = None if last else self._looked_at
