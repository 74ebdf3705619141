"""Forward passes of a model that computes its own loss: kept so that a bad one can be run again."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep.errors import MisuseError
from steadystep.measuring import draws
from steadystep.rng import RngState
from steadystep.watching import Watcher


@final
class ForwardPasses:
    """Holds on to the inputs of the present step: references, and the random state where the model draws."""

    def __init__(self, model: nn.Module, watcher: Watcher) -> None:
        self._model = model
        self._watcher = watcher
        self._device = next(model.parameters()).device
        self._draws = draws(model)
        self._again = False
        self._handle = model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def remove(self) -> None:
        """The model is as it was."""
        self._handle.remove()

    def _seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and not self._again:
            rng = RngState(self._device) if self._draws else None
            self._watcher.could_rerun(self._run, {"args": args, **kwargs} if args else kwargs, rng)

    def _run(self, batch: dict[str, Any]) -> Tensor:
        self._again = True
        try:
            inputs = dict(batch)
            return _loss_in(self._model(*inputs.pop("args", ()), **inputs))
        finally:
            self._again = False


def _loss_in(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor):
        raise MisuseError("the model does not return its loss")
    return loss
