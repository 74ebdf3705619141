"""Layers and functions that keep activations, logits and updates in range; each usable alone.

`ClippedUpdates` clips the updates of Adam-like optimizers: StableAdamW's rule (Wortsman et al. 2023, algorithm 2)
around any of them.

    RMS_t = sqrt(mean(g_t^2 / max(v_t, eps^2)))        per tensor, v_t bias-corrected and including g_t
    lr_t  = lr / max(1, RMS_t)

RMS_t is 1 when a gradient is as large as its history says, and up to 1 / sqrt(1 - beta2) when v has not caught up with
it: then Adam's step is too long, and a loss spike follows within a few steps.

It works through the optimizer's own step hooks. The optimizer stays the object it was, so schedulers, GradScaler and
state_dict know nothing of it, and there is no state of ours to save. A wrapper class would have to pretend to be an
Optimizer for each of them; scaling the gradients instead would change the moments. Learning rates belong to groups and
the rule to tensors, so the step is taken in full and then shortened: Adam's step, its decay included, is linear in the
learning rate, which makes this the same thing. The price is a copy of the weights during the step.
"""

import math
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.layers.attention import QKClipReport, StableAttention, peak_logits, qk_clip_
from steadystep.layers.limits import BoundedEmbedding, StableMLP, shrink_gradient, softcap, z_loss

__all__ = [
    "BoundedEmbedding",
    "ClippedUpdates",
    "QKClipReport",
    "StableAttention",
    "StableMLP",
    "peak_logits",
    "qk_clip_",
    "shrink_gradient",
    "softcap",
    "z_loss",
]


@final
class ClippedUpdates:
    """Shortens the update of every tensor whose gradient is larger than Adam's second moment expects.

    Attach it once after building the optimizer, and again after a resume. A step in which no RMS_t exceeds 1 is
    bit-identical to the plain one.

    Args:
        optimizer: an optimizer of the Adam family.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    >>> clipped = ClippedUpdates(optimizer)
    >>> for size in (1.0, 1.0, 30.0):
    ...     weight.grad = torch.full((4,), size)
    ...     optimizer.step()
    >>> [round(rms, 2) for rms in clipped.rms()]
    [1.73]
    """

    def __init__(self, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            betas = group.get("betas")
            if not isinstance(betas, tuple | list) or len(betas) != 2 or "eps" not in group:
                raise ConfigError(
                    f"{type(optimizer).__name__}, group {number}: update clipping needs a second moment (betas and "
                    "eps), as in Adam and its variants"
                )
        if any(isinstance(getattr(h, "__self__", None), ClippedUpdates) for h in _pre_hooks(optimizer)):
            raise MisuseError("this optimizer's updates are already clipped")
        self._clipped: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rms: list[Tensor] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()

    def rms(self) -> tuple[float, ...]:
        """Return RMS_t of the last step for the parameters that had a gradient, in the order of the groups."""
        return tuple(torch.stack([r.to(self._rms[0]) for r in self._rms]).tolist()) if self._rms else ()  # sync: asked

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(a is not None for a in args[1:]) or kwargs.get("closure") is not None:
            raise MisuseError(
                "call backward() before step(): with a closure the gradients come too late to be measured"
            )
        # A fused optimizer gets gradients that are still multiplied by the loss scale, and the scale beside them.
        scale = getattr(optimizer, "grad_scale", None)
        self._rms = []
        self._clipped = []
        for group, p in _with_gradient(optimizer):
            rms = _rms(p, group, optimizer.state.get(p, {}), scale)
            factor = torch.where(rms > 1, 1 / rms, torch.ones_like(rms))  # NaN compares false: left to the guard
            self._rms.append(rms)
            self._clipped.append((p, p.detach().clone(), factor.to(p.dtype)))

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for p, before, factor in self._clipped:
            if "exp_avg_sq" not in optimizer.state[p]:
                raise MisuseError(f"{type(optimizer).__name__} keeps no exp_avg_sq: its updates cannot be clipped")
            p.copy_(before.lerp_(p, factor))  # a factor of 1 gives p exactly
        self._clipped = []


def _with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None or not p.numel():
                continue
            if p.grad.is_sparse or p.is_complex():
                raise UnsupportedError("update clipping does not support sparse or complex gradients")
            yield group, p


def _rms(p: Tensor, group: dict[str, Any], state: dict[str, Any], scale: Tensor | None) -> Tensor:
    assert p.grad is not None
    exact = torch.promote_types(p.dtype, torch.float32)
    gradient = p.grad.to(exact) if scale is None else p.grad.to(exact) / scale
    if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
        gradient = gradient + group["weight_decay"] * p.to(exact)  # L2 decay is part of the gradient Adam sees
    squares = gradient.square()
    beta2 = group["betas"][1]
    if "exp_avg_sq" not in state:
        corrected = squares
    else:
        step = torch.as_tensor(state["step"] if "step" in state else group["step"]) + 1
        moment = state["exp_avg_sq"].to(exact) * beta2 + squares * (1 - beta2)
        # why expm1: torch counts in fp32, where 1 - 0.999^t has lost half its digits
        corrected = moment / -torch.expm1(step * math.log(beta2) if beta2 > 0 else -torch.inf * step)
    return (squares / corrected.clamp(min=group["eps"] ** 2)).mean().sqrt()


def _pre_hooks(optimizer: Optimizer) -> list[Any]:
    return list(optimizer._optimizer_step_pre_hooks.values())
