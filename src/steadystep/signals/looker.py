"""The one look: everything a step is judged by, in one pass over the gradients and one transfer to the host."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.buffers import Buffers
from steadystep.errors import MisuseError
from steadystep.look import Look
from steadystep.norms import Layout, measure
from steadystep.records import Signals
from steadystep.signals.batch import is_finite
from steadystep.signals.batch_rms import batch_rms
from steadystep.signals.gradients import Gradients
from steadystep.signals.inputs import Inputs
from steadystep.signals.probes import Probes
from steadystep.signals.weight_norms import WeightNorms

Metrics = Mapping[str, float | Tensor]

_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_NO_METRICS: dict[str, float] = {}
_ANNOUNCING = ("initial_lr", "max_lr")


@final
class Looker:
    """Takes one `Look` per optimizer step."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: Optimizer,
        buffers: Buffers,
        probes: Probes,
        inputs: Inputs,
        weights: WeightNorms | None = None,
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._buffers = buffers
        self._probes = probes
        self._inputs = inputs
        self._weights = weights or WeightNorms(gradients, wanted=False)

    def look(
        self,
        *,
        step: int,
        losses: list[Tensor],
        weights: list[float],
        scale: Tensor | None = None,
        metrics: Metrics | None = None,
        batches: list[Any] | None = None,
        repeatable: bool = False,
        refused_in_a_row: int = 0,
        measured: list[Tensor] | None = None,
    ) -> Look:
        """Measure the gradients as they stand, unscaled and unclipped; or as they were when `measured`."""
        names, grads, layout = self._gradients.collect()
        if measured is not None and len(measured) == len(grads):
            norms = measured
        else:
            norms, layout = self._measure(grads, layout)
            measured = None
        scales = [] if scale is None else [scale]
        lrs, tensor_lrs = self._learning_rates()
        watched, buffers = self._buffers.suspects()
        peaks = torch._foreach_norm(buffers, torch.inf) if buffers else ()  # no overflow, unlike an L2 norm
        probes = self._buffers.probe(step)
        tensor_metrics = [v for v in metrics.values() if isinstance(v, Tensor)] if metrics else []
        of_weights, of_batch = self._weights.at(step), None
        if batches:
            self._inputs.add(batches[0])
            of_batch = batch_rms(batches[0])
        # why: a batch that is still on the host costs no transfer; one on another device rides along after all
        here = of_batch is not None and (of_batch.device.type != "cpu" or losses[0].device.type == "cpu")
        samples, first_batches = self._probes.pending(), self._inputs.pending()

        # The only host read of a healthy step; everything rides along.
        scalars = [*norms, *losses, *scales, *tensor_lrs, *peaks, *probes, *tensor_metrics, *of_weights]
        if of_batch is not None and here:
            scalars.append(of_batch)
        host = iter(_to_host(scalars, [*samples, *first_batches]))
        each = tuple(islice(host, len(norms)))
        seen = tuple(islice(host, len(losses)))
        loss_scale = next(host) if scales else 1.0
        lrs.extend(islice(host, len(tensor_lrs)))
        peak_values = tuple(islice(host, len(peaks)))
        bad_buffers = tuple(n for n, peak in zip(watched, peak_values, strict=True) if not math.isfinite(peak))
        if probes:
            self._buffers.learn(list(islice(host, len(probes))))

        named_metrics = (
            {k: next(host) if isinstance(v, Tensor) else v for k, v in metrics.items()} if metrics else _NO_METRICS
        )
        weight_norms = tuple(islice(host, len(of_weights)))
        if of_batch is not None:
            size = next(host) if here else float(of_batch)  # sync: none, it is on the host
        signals = Signals(
            step=step,
            loss=seen[0] if len(seen) == 1 else _mean(seen, weights),
            losses=seen,
            grad_norm=math.hypot(*each),
            norms=each,
            names=names,
            bad_buffers=bad_buffers,
            buffers=tuple(watched),
            buffer_peaks=peak_values,
            weights=self._weights.names() if weight_norms else (),
            weight_norms=weight_norms,
            batch_rms=None if of_batch is None else size,
            lr=lrs[0] if len(lrs) == 1 else _largest(lrs),
            announced_lr=self._announced(),
            scale=loss_scale,
            scaled=scale is not None,
            repeatable=repeatable,
            metrics=named_metrics,
            loss_eps=_EPS.get(losses[0].dtype, _EPS[torch.float32]),
            refused_in_a_row=refused_in_a_row,
            probe=self._probes.read(list(islice(host, _count(samples)))),
            inputs=self._inputs.read(list(host)),
        )
        look = Look(signals, grads, layout, norms)
        return look if signals.healthy else self._look_closer(look, batches or [], again=measured is None)

    def with_weights(self, signals: Signals) -> Signals:
        """With the norms of the weights, which are looked at now if they have not been. Only in trouble."""
        if signals.weight_norms:
            return signals
        norms = tuple(_to_host(self._weights.measure()))
        return replace(signals, weights=self._weights.names() if norms else (), weight_norms=norms)

    def weights(self, signals: Signals) -> dict[str, float]:
        """The norms of the weights as they are now, whatever `signals` says of them."""
        now = self.with_weights(replace(signals, weights=(), weight_norms=()))
        return dict(zip(now.weights, now.weight_norms, strict=True))

    def norms(self) -> list[Tensor]:
        """Of each gradient as it is now, on the device: for a loop that will clip before it steps."""
        _, grads, layout = self._gradients.collect()
        return self._measure(grads, layout)[0]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Whose gradients are looked at."""
        return self._gradients.parameters

    def _look_closer(self, look: Look, batches: list[Any], *, again: bool = True) -> Look:
        """What is worth a second look once something seems wrong."""
        signals = look.signals
        if again and not math.isfinite(signals.grad_norm):
            # why: a gradient whose dtype changed since the layout was made may have overflowed only in its norm
            look.layout = self._gradients.regroup(look.grads)
            look.norms = measure(look.grads, look.layout)
            each = tuple(_to_host(look.norms))
            signals = replace(signals, norms=each, grad_norm=math.hypot(*each))
        signals = self.with_weights(signals)
        if signals.bad_buffers:
            signals = replace(signals, bad_buffers=self._buffers.newly_bad(signals.bad_buffers))
        look.signals = replace(signals, input_finite=is_finite(batches)) if batches else signals
        return look

    def _measure(self, grads: list[Tensor], layout: Layout) -> tuple[list[Tensor], Layout]:
        try:
            return measure(grads, layout), layout
        except NotImplementedError:  # a gradient turned sparse since the layout was made
            layout = self._gradients.regroup(grads)
            return measure(grads, layout), layout

    def _announced(self) -> float:
        """Torch's schedulers write what they rise to (`initial_lr`, `max_lr`) into the groups."""
        largest = 0.0
        for group in self._optimizer.param_groups:
            for key in _ANNOUNCING:
                value = group.get(key, 0.0)
                if isinstance(value, float | int) and value > largest:
                    largest = float(value)
        return largest

    def _learning_rates(self) -> tuple[list[float], list[Tensor]]:
        numbers: list[float] = []
        tensors: list[Tensor] = []
        for group in self._optimizer.param_groups:
            lr = group.get("lr", 0.0)
            (tensors if isinstance(lr, Tensor) else numbers).append(lr)
        return numbers, tensors


def _to_host(scalars: list[Tensor], flat: list[Tensor] | None = None) -> list[float]:
    if not scalars:
        return []
    try:
        together = torch.stack(scalars)
    except RuntimeError:  # more than one device; asking each of them would cost every step of everybody else
        together = torch.stack([scalar.to(scalars[0].device) for scalar in scalars])
    if flat:
        together = torch.cat([together, *(numbers.to(together.device) for numbers in flat)])
    values: list[float] = together.tolist()  # sync: once per look
    return values


def _count(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _largest(lrs: list[float]) -> float:
    return max(lrs) if all(math.isfinite(lr) for lr in lrs) else math.nan


def _mean(losses: tuple[float, ...], weights: list[float]) -> float:
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
    if not counted:
        return math.nan
    return sum(loss * weight for loss, weight in counted) / sum(weight for _, weight in counted)


def checked(metrics: Metrics) -> dict[str, float | Tensor]:
    """Each metric as a number or as a tensor with no dimension and no graph; refused before anything is computed."""
    return {name: _scalar(name, value) for name, value in metrics.items()}


def _scalar(name: str, value: float | Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise MisuseError(f"metrics[{name!r}] must be one real number, got {type(value).__name__}") from None
    if value.numel() != 1 or value.is_complex():
        raise MisuseError(f"metrics[{name!r}] must be one real number, got a tensor of shape {list(value.shape)}")
    plain = value.detach().reshape(())
    # why: stacked with fp32 norms, a large whole number would lose its last digits
    return plain if plain.is_floating_point() or plain.device.type == "mps" else plain.double()
