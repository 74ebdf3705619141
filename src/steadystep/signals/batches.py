"""What comes with a step: is the batch finite, how large is it, what do the first ones look like; and metrics.

Also here: which of a model's outputs counts, and how far its samples are apart.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from steadystep._utils.tree import is_readable, tensors_in
from steadystep.errors import MisuseError
from steadystep.records import InputStats

Metrics = Mapping[str, float | Tensor]


def batch_is_finite(batch: Any) -> bool | None:
    """False if any tensor inside holds NaN or infinity, True if none does, None if no number was found."""
    verdicts = [verdict for _, tensor in tensors_in(batch) if (verdict := _verdict(tensor)) is not None]
    return all(verdicts) if verdicts else None


def _verdict(tensor: Tensor) -> bool | None:
    try:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
            return None
        plain = tensor.detach()
        if plain.layout is torch.sparse_coo:
            plain = plain.coalesce().values()
        elif plain.layout is torch.jagged:
            plain = plain.values()
        return bool(plain.isfinite().all())  # sync: only after trouble
    except Exception:  # why all: a layout, dtype or subclass that cannot be looked into says nothing
        return None


_MOST_FOR_RMS = 1 << 14  # elements that are looked at
_MOST_PARTS = 64  # of containers
_PIXELS = (torch.uint8, torch.int8)
_IDS = (torch.int64, torch.int32, torch.int16)


def batch_rms(batch: Any) -> Tensor | None:
    """Root mean square of the batch, on its device; None where there is nothing to measure."""
    try:
        tensor = _sized_tensor(batch)
        return None if tensor is None else _rms(tensor.detach())
    except Exception:  # why all: a dtype or a subclass that cannot be looked into must not cost the step
        return None


def _rms(tensor: Tensor) -> Tensor:
    if tensor.numel() > _MOST_FOR_RMS:  # every n-th of each dimension: a view, whatever the strides
        every = int((tensor.numel() / _MOST_FOR_RMS) ** (1.0 / tensor.dim())) + 1
        tensor = tensor[tuple(slice(None, None, every) for _ in range(tensor.dim()))]
    ids = tensor.dtype in _IDS
    if not tensor.is_floating_point():
        tensor = tensor.float()
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    rms = norm.mul(tensor.numel() ** -0.5)
    return rms.log1p() if ids else rms


def _sized_tensor(batch: Any) -> Tensor | None:
    """The first tensor of real numbers, else the first of whole ones. A tensor without dimensions is no batch."""
    whole = None
    for _, tensor in tensors_in(batch, most_parts=_MOST_PARTS):
        if not tensor.dim() or not is_readable(tensor):
            continue
        if tensor.is_floating_point():
            return tensor
        whole = tensor if whole is None and tensor.dtype in (*_PIXELS, *_IDS) else whole
    return whole


_BATCHES = 4
_MOST = 1 << 20  # elements of one batch that are looked at


@final
class Inputs:
    """Looks at the first batches it is given, on their device, and makes one record of them.

    The first floating tensor of two dimensions or more counts. Its features are the last dimension of
    [batch, features], the channels of [batch, channels, height, width], else there is one feature: everything.
    """

    def __init__(self) -> None:
        self._left = _BATCHES
        self._seen: list[Tensor] = []
        self.waiting: list[Tensor] = []
        """One flat tensor for the next host read, once, when the last of the first batches was seen."""

    def add(self, batch: Any) -> None:
        """One more batch; after the first few this does nothing."""
        if not self._left:
            return
        self._left -= 1
        try:
            tensor = _feature_tensor(batch)
            if tensor is not None:
                self._keep(_measure(tensor))
        except Exception:  # why all: a dtype, device or subclass that cannot be looked into must not cost the step
            return
        finally:
            if not self._left and self._seen:
                self.waiting = [_merge(torch.stack(self._seen))]

    def _keep(self, measured: Tensor) -> None:
        # why: another number of features is another kind of input; there is nothing to compare
        first = self._seen[0] if self._seen else measured
        if (measured.shape, measured.device) == (first.shape, first.device):
            self._seen.append(measured)

    def read(self, values: Sequence[float]) -> InputStats | None:
        """The record, once; None when nothing was pending."""
        if not self.waiting:
            return None
        batches = len(self._seen)
        self._seen, self.waiting = [], []
        mean, std, largest, constant, spread, finite = values
        return InputStats(
            batches=batches,
            mean=mean,
            std=std,
            largest=largest,
            constant_share=constant,
            scale_spread=spread,
            finite=finite == 1.0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Whether there is anything left to look at; an unfinished look begins again."""
        return {"done": not self._left and not self.waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._left = 0 if state["done"] else _BATCHES
        self._seen, self.waiting = [], []


def _feature_tensor(batch: Any) -> Tensor | None:
    for _, tensor in tensors_in(batch, most_parts=_MOST_PARTS):
        if tensor.dim() > 1 and tensor.is_floating_point() and is_readable(tensor):
            return tensor.detach()
    return None


@torch.no_grad()
def _measure(batch: Tensor) -> Tensor:
    """[5, features]: mean, variance, smallest, largest of each feature, and the batch size in every place."""
    examples = batch[: max(1, _MOST // max(1, batch[0].numel()))]
    values = examples.to(torch.promote_types(examples.dtype, torch.float32))
    features = {2: 1, 4: 1}.get(values.dim())
    values = values.reshape(-1, 1) if features is None else values.movedim(features, -1).flatten(0, -2)
    variance, mean = torch.var_mean(values, 0, correction=0)
    count = torch.full_like(mean, len(values))
    return torch.stack((mean, variance, values.amin(0), values.amax(0), count))


@torch.no_grad()
def _merge(seen: Tensor) -> Tensor:
    """From [batches, 5, features] to the numbers of the record."""
    means, variances, low, high, counts = seen.unbind(1)
    share = counts / counts.sum(0)
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean).square())).sum(0)
    low, high = low.amin(0), high.amax(0)
    largest = torch.maximum(low.abs(), high.abs()).amax()
    overall = mean.mean()
    std = (variance + (mean - overall).square()).mean().sqrt()
    varies = low != high
    scales = variance.sqrt()
    smallest = torch.where(varies & (scales > 0), scales, torch.inf).amin()
    spread = torch.where(smallest.isfinite(), scales.amax() / smallest, torch.ones_like(smallest))
    constant = 1.0 - varies.to(mean.dtype).mean()
    finite = (low.isfinite() & high.isfinite()).all().to(mean.dtype)
    return torch.stack((overall, std, largest, constant, spread, finite))


def checked_metrics(metrics: Metrics) -> dict[str, float | Tensor]:
    """Each metric as a number or as a tensor with no dimension and no graph; refused before anything is computed."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise MisuseError(f"metrics = {str(metrics)[:60]}: must map names to numbers, as in {{'reward': 1.0}}")
    return {name: _scalar(name, value) for name, value in metrics.items()}


def _scalar(name: str, value: float | Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise MisuseError(f"metrics[{name!r}] must be one real number, got {type(value).__name__}") from None
    if value.numel() != 1 or value.is_complex() or value.is_meta:
        shape = f"{list(value.shape)} on {value.device}"
        raise MisuseError(f"metrics[{name!r}] must be one real number, got a tensor of shape {shape}")
    plain = value.detach().reshape(())
    # why: stacked with fp32 norms, a large whole number would lose its last digits
    return plain if plain.is_floating_point() or plain.device.type == "mps" else plain.double()


def as_numbers(metrics: Metrics, read: list[float]) -> dict[str, float]:
    """Each metric as a number; those that were tensors have been `read`, in their order."""
    numbers = iter(read)
    return {name: next(numbers) if isinstance(value, Tensor) else value for name, value in metrics.items()}


MOST = 1 << 20
"""Elements of an output that are measured."""
UNKNOWN = torch.full((), math.nan)


def is_batch_first(shape: Sequence[int], batch: list[tuple[str, Tensor]]) -> bool:
    """Whether the first dimension is that of the samples: so say the inputs and the targets of the batch."""
    if len(batch) < 2:
        return False
    inputs, targets = batch[0][1], batch[-1][1]
    rows = len(inputs)
    one_label_each = targets.dim() == 1 and len(targets) == rows
    return one_label_each and inputs.dim() > 1 and shape[0] == rows != shape[1]


def main_tensor(output: Any) -> Tensor | None:
    """The logits by their name, else the first tensor of real numbers."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        output = output["logits"]
    for _, tensor in tensors_in(output, most_parts=64):
        if tensor.dim() and tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
            return tensor
    return None


def faintest(everything: Any, main: Tensor) -> Tensor:
    """How little the samples differ in any further output that has a row for each, as a share of its size."""
    others = [
        t.detach().float()
        for _, t in tensors_in(everything, most_parts=8)
        if t is not main and t.is_floating_point() and t.dim() > 1 and len(t) == len(main) > 1 and t.numel() <= MOST
    ]
    shares = [spread_of(t) / t.square().mean().sqrt().clamp(min=1e-30) for t in others]
    return torch.stack(shares).amin() if shares else UNKNOWN


def spread_of(values: Tensor | None) -> Tensor:
    """How far the samples of a batch are apart; NaN for fewer than two."""
    if values is None or len(values) < 2 or values.is_complex():
        return torch.full((), math.nan)
    rows = values[: max(2, MOST // max(1, values[0].numel()))]
    return rows.float().var(0, correction=0).mean().sqrt()


def size_of_inputs(given: Any) -> Tensor:
    """Largest mean square of the real tensors that the model was called with; NaN where there is none."""
    real = [t for _, t in tensors_in(given, most_parts=8) if t.is_floating_point() and t.dim() and is_readable(t)]
    sizes = [t.detach().float().square().mean() for t in real if 0 < t.numel() <= MOST]  # a norm would be a pass more
    if len(sizes) < 2:
        return sizes[0] if sizes else UNKNOWN
    return torch.stack([size.to(sizes[0].device) for size in sizes]).amax()


def values_of(values: Tensor) -> list[Tensor]:
    """Smallest, largest, RMS, spread, errors of the sums over rows and columns, entropy, alignment, distinct rows."""
    low, high = torch.aminmax(values)
    rms = values.square().mean().sqrt()
    unknown = torch.full_like(rms, math.nan)
    if values.dim() < 2:
        return [low, high, rms, spread_of(values), unknown, unknown, unknown, unknown, unknown]
    row, column = ((values.sum(dim) - 1.0).abs().amax() for dim in (-1, 0))
    entropy = alignment = unknown
    if values.shape[-1] > 1:
        logs, rows = torch.log_softmax(values, -1), values.flatten(0, -2)
        entropy = -(logs.exp() * logs).sum(-1).mean()
        units = rows * rows.square().sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()
        alignment = units.mean(0).square().sum().sqrt()
    samples = values.flatten(1)
    apart = ((samples - samples.roll(1, 0)).abs().amax(1) > 1e-6 * rms).float().mean()
    return [low, high, rms, spread_of(values), row, column, entropy, alignment, apart]
