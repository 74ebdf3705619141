"""What the first batches look like: scale, spread and constant features. Evidence for a diagnosis, never an alarm."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from steadystep.batch_tensors import is_readable, tensors_in
from steadystep.records import InputStats

_BATCHES = 4
_MOST = 1 << 20  # elements of one batch that are looked at
_MOST_PARTS = 64  # of containers


@final
class Inputs:
    """Looks at the first batches it is given, on their device, and makes one record of them.

    The first floating tensor of two dimensions or more counts. Its features are the last dimension of
    [batch, features], the channels of [batch, channels, height, width], else there is one feature: everything.
    """

    def __init__(self) -> None:
        self._left = _BATCHES
        self._seen: list[Tensor] = []
        self._pending: list[Tensor] = []

    def add(self, batch: Any) -> None:
        """One more batch; after the first few this does nothing."""
        if not self._left:
            return
        self._left -= 1
        try:
            tensor = _find(batch)
            if tensor is not None:
                self._keep(_measure(tensor))
        except Exception:  # why all: a dtype, device or subclass that cannot be looked into must not cost the step
            return
        finally:
            if not self._left and self._seen:
                self._pending = [_merge(torch.stack(self._seen))]

    def _keep(self, measured: Tensor) -> None:
        # why: another number of features is another kind of input; there is nothing to compare
        first = self._seen[0] if self._seen else measured
        if (measured.shape, measured.device) == (first.shape, first.device):
            self._seen.append(measured)

    def pending(self) -> list[Tensor]:
        """One flat tensor for the next host read, once, when the last of the first batches was seen."""
        return self._pending

    def read(self, values: Sequence[float]) -> InputStats | None:
        """The record, once; None when nothing was pending."""
        if not self._pending:
            return None
        batches = len(self._seen)
        self._seen, self._pending = [], []
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
        return {"done": not self._left and not self._pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._left = 0 if state["done"] else _BATCHES
        self._seen, self._pending = [], []


def _find(batch: Any) -> Tensor | None:
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
