"""Adam's second moments of some parameters, with what their bias correction needs. Everything stays on the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.clip.sharded import is_sharded, local_part


@final
@dataclass(frozen=True, slots=True)
class SecondMoments:
    """Aligned with the parameters."""

    tensors: list[Tensor | None]
    """v as the optimizer keeps it; None where there is none of the parameter's own shape."""
    corrections: Tensor
    """1 - beta2^t: v divided by it is free of the bias of its start."""
    floors: Tensor
    """eps², times the correction: what v is at least counted as."""


@final
class Moments:
    """Reads the state of Adam and its kin (`exp_avg_sq`); other optimizers have nothing to show."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Parameter]) -> None:
        self._optimizer = optimizer
        self._params = params
        self._device = params[0].device
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._groups = [groups[id(p)] for p in params]
        self._settings: dict[tuple[Any, ...], Tensor] = {}

    def now(self) -> SecondMoments | None:
        """What the optimizer holds; None when no parameter has a second moment."""
        states = [self._optimizer.state.get(p, {}) for p in self._params]
        held = [s.get("exp_avg_sq") for s in states]
        if is_sharded(self._params):
            tensors = [_usable(_part(v), local_part(p)) for v, p in zip(held, self._params, strict=True)]
        else:
            tensors = [_usable(v, p) for v, p in zip(held, self._params, strict=True)]
        if not any(tensor is not None for tensor in tensors):
            return None
        # An optimizer that does not count its steps is taken to correct nothing.
        steps = _vector([s.get("step", math.inf) for s in states], self._device)
        corrections = torch.expm1(steps * self._per_param(_log_decay)).neg_()
        return SecondMoments(tensors, corrections, corrections * self._per_param(_epsilon).square())

    def _per_param(self, setting: Any) -> Tensor:
        values = [setting(group) for group in self._optimizer.param_groups]
        if any(isinstance(value, Tensor) for value in values):
            return _vector([values[i] for i in self._groups], self._device)
        key = (setting, *values)
        if key not in self._settings:
            self._settings[key] = _vector([values[i] for i in self._groups], self._device)
        return self._settings[key]


def _part(moment: Any) -> Any:
    return local_part(moment) if isinstance(moment, Tensor) else None


def _usable(moment: Any, parameter: Tensor) -> Tensor | None:
    # why: a subclass is quantised or sharded, and one on another device is offloaded: both cost too much to look at
    if type(moment) is Tensor and moment.shape == parameter.shape and moment.device == parameter.device:
        return moment if moment.is_floating_point() else None
    return None


def _log_decay(group: dict[str, Any]) -> float | Tensor:
    beta = group.get("betas", (0.0, 0.0))[1]
    if isinstance(beta, Tensor):
        return beta.log()
    return math.log(beta) if beta > 0 else -math.inf


def _epsilon(group: dict[str, Any]) -> float | Tensor:
    epsilon: float | Tensor = group.get("eps", 0.0)
    return epsilon


def _vector(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """On the device, whether the optimizer keeps numbers, host tensors or device tensors."""
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
    try:
        together = torch.stack(values)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # of several kinds or devices
        together = torch.stack([torch.as_tensor(v).to(device, torch.float32, non_blocking=True) for v in values])
    # why: Adam counts its steps on the host; a copy from there must not wait for all the device has to do
    return together.to(device=device, dtype=torch.float32, non_blocking=True)
