"""The one look: everything a step is judged by, in one pass over the gradients and one transfer to the host."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadystep.buffers import Buffers
from steadystep.errors import MisuseError
from steadystep.look import Look
from steadystep.norms import Layout, Norms, measure
from steadystep.records import Signals
from steadystep.signals.batch import is_finite
from steadystep.signals.gradients import Gradients

Metrics = Mapping[str, float | Tensor]


@final
class Looker:
    """Takes one `Look` per optimizer step."""

    def __init__(self, gradients: Gradients, optimizer: Optimizer, buffers: Buffers, *, for_clipping: bool) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._buffers = buffers
        self._for_clipping = for_clipping

    @torch.no_grad()
    def look(
        self,
        *,
        step: int,
        losses: Sequence[Tensor],
        weights: Sequence[float],
        scale: Tensor | None,
        metrics: Metrics,
        batches: Sequence[Any],
        repeatable: bool,
    ) -> Look:
        """Measure the gradients as they stand, unscaled and unclipped."""
        names, grads, layout = self._gradients.collect()
        norms, layout = self._measure(grads, layout)
        scales = [] if scale is None else [scale]
        lrs = [g["lr"] for g in self._optimizer.param_groups if "lr" in g]
        tensor_lrs = [lr for lr in lrs if isinstance(lr, Tensor)]
        watched, buffers = self._buffers.suspects()
        peaks = torch._foreach_norm(buffers, torch.inf) if buffers else ()  # no overflow, unlike an L2 norm
        probes = self._buffers.probe(step)
        tensor_metrics = [_scalar(name, v) for name, v in metrics.items() if isinstance(v, Tensor)] if metrics else []

        # sync: the only one of a healthy step; everything rides along.
        pieces = (norms.total, *losses, *scales, *tensor_lrs, *peaks, *probes, *tensor_metrics)
        host = iter(_to_host(norms.each, pieces))
        each = tuple(islice(host, len(grads)))
        total = next(host)
        seen = tuple(islice(host, len(losses)))
        loss_scale = next(host) if scales else 1.0
        read_lrs = list(islice(host, len(tensor_lrs)))
        bad_buffers = tuple(n for n, p in zip(watched, islice(host, len(peaks)), strict=True) if not math.isfinite(p))
        if probes:
            self._buffers.learn(list(islice(host, len(probes))))

        signals = Signals(
            step=step,
            loss=_mean(seen, weights),
            losses=seen,
            grad_norm=total,
            norms=each,
            names=names,
            bad_buffers=bad_buffers,
            lr=max([*read_lrs, *(lr for lr in lrs if not isinstance(lr, Tensor))], default=0.0),
            scale=loss_scale,
            scaled=scale is not None,
            repeatable=repeatable,
            metrics={k: next(host) if isinstance(v, Tensor) else float(v) for k, v in metrics.items()},
        )
        if not signals.healthy and batches:
            signals = replace(signals, input_finite=is_finite(list(batches)))
        return Look(signals, grads, layout, norms)

    def _measure(self, grads: list[Tensor], layout: Layout) -> tuple[Norms, Layout]:
        try:
            return measure(grads, layout, for_clipping=self._for_clipping), layout
        except NotImplementedError:  # a gradient turned sparse since the layout was made
            layout = self._gradients.regroup(grads)
            return measure(grads, layout, for_clipping=self._for_clipping), layout


def _to_host(each: Tensor, pieces: Sequence[Tensor]) -> list[float]:
    device = each.device
    together = torch.stack([p if p.device == device else p.to(device) for p in pieces])
    values: list[float] = torch.cat((each, together)).tolist()  # sync: called once per look
    return values


def _mean(losses: tuple[float, ...], weights: Sequence[float]) -> float:
    if len(losses) == 1:
        return losses[0]
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
    if not counted:
        return math.nan
    return sum(loss * weight for loss, weight in counted) / sum(weight for _, weight in counted)


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1 or value.is_complex():
        raise MisuseError(f"metrics[{name!r}] must be one real number, got a tensor of shape {list(value.shape)}")
    return value.detach().reshape(())
