"""Which targets a loss is computed from, where no batch is given: heard from torch's own loss functions.

They stand aside for one sampled forward pass, as `scaled_dot_product_attention` does in `attention_logits`.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from torch import Tensor
from torch.nn import functional

from steadystep.signals.activations import compiles

_NAMES = (
    "cross_entropy",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
)
_OURS = "_heard_by_steadystep"


@final
class LossCalls:
    """Stands in for torch's loss functions and keeps the target of the first call."""

    def __init__(self) -> None:
        self._plain: dict[str, Any] = {}
        self._heard: dict[str, Any] = {}
        self.target: Tensor | None = None

    def start(self) -> None:
        """Not where something is compiled, nor where a function is replaced already."""
        self.target = None
        if self._plain or compiles():
            return
        for name in _NAMES:
            plain = vars(functional).get(name)
            if callable(plain) and not hasattr(plain, _OURS):
                self._plain[name] = plain
                self._heard[name] = vars(functional)[name] = _heard(plain, self._keep)

    def stop(self) -> None:
        """Torch's own functions are back."""
        for name, plain in self._plain.items():
            if vars(functional).get(name) is self._heard[name]:
                vars(functional)[name] = plain
        self._plain, self._heard = {}, {}

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if self.target is None and isinstance(target, Tensor):
            self.target = target.detach()


def _heard(plain: Callable[..., Any], tell: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # why: what cannot be kept is a loss all the same
            tell(args, kwargs)
        return plain(*args, **kwargs)

    setattr(call, _OURS, True)
    return call
