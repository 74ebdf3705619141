"""Working under a `GradScaler` that the loop owns.

On an overflow a scaler does not call `optimizer.step` at all, so a hook of the optimizer would never hear of it. But
torch has a contract for optimizers that deal with scaled gradients themselves: `_step_supports_amp_scaling`. With it
`step` is always called, and finds the scale (unless `unscale_` was called before) and the scaler's verdict as
attributes. We sign it for the time of the watch, unscale, and let the guard decide; the scaler's `update` sees the
overflow as ever.
"""

from typing import Any, final

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

_CONTRACT = "_step_supports_amp_scaling"


@final
class LossScaling:
    """The seam between somebody's scaler and the optimizer that is watched."""

    def __init__(self, optimizer: Optimizer, scaler: GradScaler | None, *, signs: bool) -> None:
        self._optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._fused = bool(getattr(optimizer, _CONTRACT, False))
        self._signed = signs and not self._fused
        self._one: Tensor | None = None
        if self._signed:
            vars(optimizer)[_CONTRACT] = True

    def open(self) -> bool:
        """Inside a step: gradients are unscaled from here on. True when a scaler is at work."""
        held: dict[str, Any] = vars(self._optimizer)
        if held.get("found_inf") is None:
            return self.scaler is not None  # unscaled before it came here
        scale = held.get("grad_scale")
        if isinstance(scale, Tensor):
            self._unscale_(scale)
        held["grad_scale"] = None
        if not self._fused:  # why: torch's other kernels refuse to run with it
            held["found_inf"] = None
        return True

    def scale(self, device: torch.device) -> Tensor | None:
        """The scale in use, on the device; None when the scaler is not known."""
        if self.scaler is None:
            return None
        if self._one is None or self._one.device != device:
            self._one = torch.ones((), device=device)
        scaled: Tensor = self.scaler.scale(self._one)
        return scaled

    def remove(self) -> None:
        """The optimizer is as it was."""
        if self._signed:
            vars(self._optimizer).pop(_CONTRACT, None)

    @torch.no_grad()
    def _unscale_(self, scale: Tensor) -> None:
        inverse = scale.double().reciprocal().float()  # the arithmetic of GradScaler.unscale_
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
