"""A hook on somebody else's model that can do no harm there."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import torch


@final
class SilentHook:
    """Stays behind when the model is copied or saved, is not compiled, and raises nothing into the loop."""

    def __init__(self, tell: Callable[..., None] | None = None) -> None:
        self._tell = tell

    def __call__(self, *args: Any) -> None:
        """Pass on what the hook was called with."""
        if self._tell is not None and not torch.compiler.is_compiling():
            try:
                self._tell(*args)
            except Exception:  # why: a pass that cannot be remembered is still the loop's pass
                return

    def __deepcopy__(self, _: Any) -> "SilentHook":
        return SilentHook()

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # why: takes anything, does nothing, and loads without this package
