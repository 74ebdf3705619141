"""The one look: everything a step is judged by, in one pass over the gradients and one transfer to the host."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.numbers import mean_by_weight
from steadystep._utils.tensors import Layout, measure, read_mixed, read_together
from steadystep.records import WEIGHTS_EVERY, Signals
from steadystep.signals.batch_stats import FIRST
from steadystep.signals.batches import Inputs, Metrics, as_numbers, batch_is_finite, batch_rms
from steadystep.signals.gradients import Gradients, GradientView, learning_rates
from steadystep.signals.outputs import Evidence
from steadystep.signals.probes import UpdateProbes
from steadystep.signals.weights import OFFSET, StatePeaks, WeightNorms
from steadystep.snapshots.buffers import Buffers

_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_NO_METRICS: dict[str, float] = {}
_NOTHING = slice(0)
_NO_BUFFERS: tuple[list[str], slice, slice] = ([], _NOTHING, _NOTHING)


@final
class Transfer:
    """One read for many numbers: `add` says where each will be, `read` brings them.

    >>> transfer = Transfer([torch.tensor(1.0), torch.tensor(2.0)])
    >>> losses = transfer.add([torch.tensor(3.0)])
    >>> values = transfer.read()
    >>> values[:2], values[losses]
    ([1.0, 2.0], [3.0])
    """

    __slots__ = ("_scalars", "together")

    def __init__(self, first: Iterable[Tensor] = (), second: Iterable[Tensor] = ()) -> None:
        self._scalars: list[Tensor] = [*first, *second]
        self.together: Tensor | None = None
        """After `read`, all of them side by side on their device; None where they were on several."""

    def __len__(self) -> int:
        return len(self._scalars)

    def add(self, scalars: Iterable[Tensor]) -> slice:
        """Tensors of no dimension; the place they will have in what `read` returns."""
        start = len(self._scalars)
        self._scalars.extend(scalars)
        return slice(start, len(self._scalars))

    def read(self, flat: Sequence[Tensor] = ()) -> list[float]:
        """All of them, then the elements of `flat`, tensors of one dimension each."""
        scalars = self._scalars
        if not scalars:
            return []
        try:
            self.together = torch.stack(scalars)
        except RuntimeError:  # more than one device; asking each of them would cost every step of everybody else
            return read_mixed(scalars, flat)
        return read_together(self.together, flat)


class Announces(Protocol):
    """A learning rate with a plan."""

    announced: float
    """The largest that it is known to come to; 0 without a plan."""


@final
class Measurer:
    """Makes one `GradientView` per optimizer step."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: Optimizer,
        buffers: Buffers,
        probes: UpdateProbes,
        inputs: Inputs,
        weights: WeightNorms | None = None,
        state: StatePeaks | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        self._gradients = gradients
        self.versions = gradients.versions
        """Of each gradient: what tells that somebody has changed it."""
        self._optimizer = optimizer
        self._buffers = buffers
        self._probes = probes
        self._inputs = inputs
        self._weights = weights or WeightNorms(gradients, wanted=False)
        self._state = state or StatePeaks(gradients, optimizer, dict, wanted=False)
        self._evidence = evidence or Evidence()
        self.learning_rate: Announces | None = None
        """The guard's own schedule, if it has one."""
        self.over_ranks: Callable[[Sequence[str], Sequence[float]], dict[str, float]] | None = None
        """Turns norms of the weights here into those over all ranks; None in a single process."""
        self.riders: Sequence[Tensor] = ()
        """Numbers that ride along with the next read."""
        self.ridden: list[float] = []

    def measure(
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
    ) -> GradientView:
        """Measure the gradients as they stand, unscaled and unclipped; or as they were when `measured`."""
        names, grads, layout = self._gradients.collect()
        if measured is not None and len(measured) == len(grads):
            norms = measured
        else:
            norms, layout = self._measure(grads, layout)
            measured = None
        transfer = Transfer(norms, losses)
        read = self._read(transfer, step, len(norms), losses, scale=scale, metrics=metrics, batches=batches)
        each, seen = read["norms"], read["losses"]
        signals = Signals(
            step=step,
            loss=seen[0] if len(seen) == 1 else mean_by_weight(seen, weights),
            grad_norm=math.hypot(*each),
            names=names,
            scaled=scale is not None,
            repeatable=repeatable,
            loss_eps=_EPS.get(losses[0].dtype, _EPS[torch.float32]),
            refused_in_a_row=refused_in_a_row,
            **read,
        )
        together = transfer.together  # why the dtype below: a loss of another one has promoted them
        stacked = (
            together[: len(norms)] if together is not None and norms and together.dtype == norms[0].dtype else None
        )
        view = GradientView(signals, grads, layout, norms, stacked, names)
        return view if signals.all_finite else self._look_closer(view, batches, again=measured is None)

    def _read(
        self,
        transfer: Transfer,
        step: int,
        count: int,
        losses: list[Tensor],
        *,
        scale: Tensor | None,
        metrics: Metrics | None,
        batches: list[Any] | None,
    ) -> dict[str, Any]:
        """The only host read of a healthy step, everything rides along: fields of `Signals`."""
        lrs, tensor_lrs, announced = learning_rates(self._optimizer)
        of_scale = transfer.add((scale,)) if scale is not None else _NOTHING
        of_lrs = transfer.add(tensor_lrs) if tensor_lrs else _NOTHING
        watched, of_peaks, of_constants = self._ask_buffers(step, transfer) if self._buffers.modules else _NO_BUFFERS
        of_metrics = transfer.add([v for v in metrics.values() if isinstance(v, Tensor)]) if metrics else _NOTHING
        of_weights = self._ask_weights(step, transfer) if step % WEIGHTS_EVERY == OFFSET or step == 0 else None
        size, of_batch = self._ask_batch(batches, losses[0].device, step, transfer) if batches else (None, None)
        of_riders = transfer.add(self.riders) if self.riders else _NOTHING
        waiting, end = (self._probes.waiting, self._inputs.waiting, self._evidence.waiting), len(transfer)
        host = transfer.read(list(chain(*waiting)) if any(waiting) else ())
        peaks, self.riders, self.ridden = tuple(host[of_peaks]), (), host[of_riders]
        if host[of_constants]:
            self._buffers.learn(host[of_constants])
        lrs += host[of_lrs]
        return {
            "norms": tuple(host[:count]),
            "losses": tuple(host[count : count + len(losses)]),
            "bad_buffers": _not_finite(watched, peaks) if peaks else (),
            "buffers": tuple(watched),
            "buffer_peaks": peaks,
            "batch_rms": size if of_batch is None else host[of_batch],
            "lr": lrs[0] if len(lrs) == 1 else _largest(lrs),
            "announced_lr": announced if self.learning_rate is None else max(announced, self.learning_rate.announced),
            "scale": 1.0 if scale is None else host[of_scale.start],
            "metrics": as_numbers(metrics, host[of_metrics]) if metrics else _NO_METRICS,
            **(self._read_waiting(waiting, host, end) if any(waiting) or self._probes.record is not None else {}),
            **(self._read_weights(host, *of_weights) if of_weights is not None else {}),
        }

    def _read_waiting(self, waiting: Sequence[list[Tensor]], host: list[float], end: int) -> dict[str, Any]:
        """What probes, the first batches and the looks at outputs had put behind everything else."""
        samples, first_batches, looks = waiting
        begin = end + sum([sample.numel() for sample in samples])
        rest = begin + sum([batch.numel() for batch in first_batches])
        probe = self._probes.read(host[end:begin]) if samples or self._probes.record is not None else None
        inputs = self._inputs.read(host[begin:rest]) if first_batches else None
        return {"probe": probe, "inputs": inputs, **(self._evidence.read(host[rest:]) if looks else {})}

    def _ask_weights(self, step: int, transfer: Transfer) -> tuple[slice, slice, slice]:
        """Norms of the weights, peaks of the optimizer's state, and once what the weights began as."""
        due, alone = step % WEIGHTS_EVERY == OFFSET, self.over_ranks is None
        of_norms = transfer.add(self._weights.measure()) if due and alone else _NOTHING
        of_state = transfer.add(self._state.measure()) if due else _NOTHING
        return of_norms, of_state, transfer.add(self._weights.begin()) if step == 0 and alone else _NOTHING

    def _read_weights(self, host: list[float], of_norms: slice, of_state: slice, of_first: slice) -> dict[str, Any]:
        norms, peaks = tuple(host[of_norms]), tuple(host[of_state])
        read: dict[str, Any] = {"weights": self._weights.names(), "weight_norms": norms} if norms else {}
        read |= {"state": self._state.names, "state_peaks": peaks} if peaks else {}
        return read | ({"initial": self._weights.read(host[of_first])} if host[of_first] else {})

    def _ask_buffers(self, step: int, transfer: Transfer) -> tuple[list[str], slice, slice]:
        """Those that the forward pass writes: how large they are, and at some steps which of them it has written."""
        watched, buffers = self._buffers.suspects(step)
        of_peaks = transfer.add(torch._foreach_norm(buffers, torch.inf)) if buffers else _NOTHING  # L2 may overflow
        return watched, of_peaks, transfer.add(self._buffers.probe(step))

    def with_weights(self, signals: Signals) -> Signals:
        """With the norms of the weights, which are looked at now if they have not been. Only in trouble."""
        if signals.weight_norms:
            return signals
        norms = Transfer(self._weights.measure()).read()
        if self.over_ranks is not None:
            whole = self.over_ranks(self._weights.names(), norms)
            return replace(signals, weights=tuple(whole), weight_norms=tuple(whole.values()))
        return replace(signals, weights=self._weights.names() if norms else (), weight_norms=tuple(norms))

    def weighed(self, view: GradientView) -> GradientView:
        """What all ranks agreed on, with the norms of the weights where they are due or something is not finite."""
        due = view.signals.step % WEIGHTS_EVERY == OFFSET or not view.signals.all_finite
        return replace(view, signals=self.with_weights(view.signals)) if due else view

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

    def _look_closer(self, view: GradientView, batches: list[Any] | None, *, again: bool) -> GradientView:
        """What is worth a second look once something seems wrong."""
        signals = view.signals
        if again and not math.isfinite(signals.grad_norm):
            # why: a gradient whose dtype changed since the layout was made may have overflowed only in its norm
            layout = self._gradients.regroup(view.grads)
            view = replace(view, layout=layout, norms=measure(view.grads, layout), stacked=None)
            each = tuple(Transfer(view.norms).read())
            signals = replace(signals, norms=each, grad_norm=math.hypot(*each))
        if self.over_ranks is None:  # else once all ranks know of it
            signals = self.with_weights(signals)
        bad = self._buffers.newly_bad(signals.bad_buffers, grave=not signals.is_finite)
        finite = batch_is_finite(batches) if batches else None
        return replace(view, signals=replace(signals, bad_buffers=bad, input_finite=finite))

    def _ask_batch(
        self, batches: list[Any], device: torch.device, step: int, transfer: Transfer
    ) -> tuple[float | None, int | None]:
        """A number for the size of the batch, or where it will be."""
        self._inputs.add(batches[0])
        if step < FIRST or step.bit_count() == 1 or not step % 128:
            self._evidence.add(batches[0], step)
        size = batch_rms(batches[0])
        if size is None:
            return None, None
        if size.device.type == "cpu" != device.type:
            return float(size), None  # sync: none, it is on the host
        return None, transfer.add((size,)).start

    def _measure(self, grads: list[Tensor], layout: Layout) -> tuple[list[Tensor], Layout]:
        try:
            return measure(grads, layout), layout
        except NotImplementedError:  # a gradient turned sparse since the layout was made
            layout = self._gradients.regroup(grads)
            return measure(grads, layout), layout


def _not_finite(names: Sequence[str], peaks: Sequence[float]) -> tuple[str, ...]:
    return tuple([name for name, peak in zip(names, peaks, strict=True) if not math.isfinite(peak)])


def _largest(lrs: list[float]) -> float:
    return max(lrs) if all(math.isfinite(lr) for lr in lrs) else math.nan
