"""Weights that the loop itself replaces: `load_state_dict` in the middle of a run, or a change that was announced.

A lottery ticket rewound, a better member of a population copied, an average swapped in: from outside this looks like
damage, and is meant. What is swapped in and out again between two steps changes nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from steadystep.signals.silent_hook import SilentHook


@final
class WeightEdits:
    """Compares the norms of all weights before the first `load_state_dict` since the last step with those after it.

    A healthy step costs one comparison with None. On several ranks only what is announced counts: a hook that one of
    them missed would part them.
    """

    def __init__(self, model: nn.Module, parameters: Callable[[], Sequence[Parameter]], *, hooked: bool = True) -> None:
        self._parameters = parameters
        self._before: Tensor | None = None
        hook = SilentHook(self.expect)
        modules = model.modules() if hooked else ()
        self._handles: list[RemovableHandle] = [
            each.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            for each in modules
        ]

    @classmethod
    def none(cls) -> "WeightEdits":
        """Of no model."""
        return cls(nn.Module(), tuple, hooked=False)

    def expect(self, *_: Any) -> None:
        """Weights may be about to change."""
        if self._before is None:
            self._before = self._norms()

    def made(self) -> bool:
        """Whether they have changed since, to something finite; asked once per step."""
        if self._before is None:
            return False
        before, self._before = self._before, None
        now = self._norms()
        same = now.shape == before.shape and torch.equal(now, before)  # sync: only after a `load_state_dict`
        return not same and bool(now.isfinite().all())

    def remove(self) -> None:
        """The model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """What was loaded belongs to a state that the guard is given too."""
        self._before = None

    def _norms(self) -> Tensor:
        weights = [weight.detach() for weight in self._parameters()]
        norms = [torch.linalg.vector_norm(weight, dtype=torch.float32).reshape(()) for weight in weights]
        device = norms[0].device if norms else None
        return torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(0)
