"""Weights that the loop itself replaces: `load_state_dict` in the middle of a run, or a change that was announced.

A lottery ticket rewound, a better member of a population copied, an average swapped in: from outside this looks like
damage, and is meant. What is swapped in and out again between two steps changes nothing.
"""

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steadystep._utils.tensors import local_part
from steadystep.optimizers import Trained
from steadystep.signals.activations import SilentHook

_MEASURED_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


@final
class WeightEdits:
    """Compares the norms of all weights before the first `load_state_dict` since the last step with those after it.

    A healthy step costs one look at a flag. On several ranks only what is announced counts: a hook that one of
    them missed would part them.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Trained,
        optimizers: Sequence[Optimizer] = (),
        *,
        hooked: bool = True,
    ) -> None:
        self._trained = trained
        self._before: Tensor | None = None
        self.edition = 0
        """How often they have changed."""
        self.suspected = False
        """They may have since `count` was asked last."""
        self._replaced = False
        """The optimizer's state was."""
        told = weakref.WeakMethod(self.expect)  # why: the model must not keep a guard that was dropped, nor its moments
        hook = SilentHook(lambda *_: (expect := told()) and expect())
        modules = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)] if hooked else []
        self._handles: list[RemovableHandle] = [
            each.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            for each in modules
        ]
        gone = weakref.WeakMethod(self._replace)
        hook = SilentHook(lambda *_: (replace := gone()) and replace())
        if hooked:
            with suppress(AttributeError):  # why: an optimizer that wraps another one need not have hooks
                self._handles += [each.register_load_state_dict_pre_hook(hook) for each in optimizers]
        weakref.finalize(self, _remove, self._handles)

    def expect(self) -> None:
        """Weights may be about to change."""
        self.suspected = True
        if self._before is None:
            self._before = self._norms()

    def count(self) -> int:
        """How often they have changed so far, to something finite; to be asked where they are `suspected` to."""
        self.suspected = False
        if self._before is not None:
            before, self._before = self._before, None
            now = self._norms()
            same = now.shape == before.shape and torch.equal(now, before)  # sync: only after a `load_state_dict`
            self._replaced = self._replaced or (not same and bool(now.isfinite().all()))
        self.edition += self._replaced
        self._replaced = False
        return self.edition

    def remove(self) -> None:
        """The model is as it was."""
        _remove(self._handles)

    def forget(self) -> None:
        """What was loaded belongs to a state that the guard is given too."""
        self._before, self._replaced, self.suspected = None, False, False

    def _replace(self) -> None:
        self._replaced = self.suspected = True

    def _norms(self) -> Tensor:
        weights = [local_part(weight).detach() for weight in self._trained.parameters if weight.dtype in _MEASURED_IN]
        norms = [torch.linalg.vector_norm(weight, dtype=_MEASURED_IN[weight.dtype]) for weight in weights]
        device = norms[0].device if norms else None
        return torch.cat([norm.reshape(1).to(device) for norm in norms]) if norms else torch.zeros(0)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
