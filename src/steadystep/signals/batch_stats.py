"""The tensors of the batches: how they vary inside a batch and from batch to batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor

from steadystep._utils.tree import is_readable, tensors_in
from steadystep.records import BatchPartStats, BatchStats

FIRST = 16
"""Batches at the start that are all measured."""
_KEPT = 8  # batches whose tensors are held for one step, to tell a new tensor from the same one
_MOST_PARTS = 6
_MOST = 1 << 16  # elements of one tensor that are measured
_MOST_FEATURES = 1 << 12  # of a row whose values are counted
_BINS = 1024
_IGNORED = -100
_NUMBERS = 15
_COPY = 0.9999  # correlation over a batch
_MOST_COPIES = 1 << 12  # features that are compared with the target


def batch_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """The first tensors of a batch that can be measured, by name."""
    found = []
    for name, tensor in tensors_in(batch, most_parts=64):
        with suppress(Exception):  # why all: a subclass may refuse any operation
            if tensor.dim() and is_readable(tensor) and not tensor.is_complex():
                found.append((name, tensor.detach()))
    return found[:_MOST_PARTS]


@final
class PartStats:
    """Running statistics of one tensor of the batch, on its device."""

    def __init__(self, name: str, tensor: Tensor, *, flat: bool = False) -> None:
        """`flat`: all values are one feature, as where the length differs from batch to batch."""
        self.name = name
        self.whole = not tensor.is_floating_point()
        self.shape = tuple(tensor.shape[1:])
        self.flat = flat
        self.rows = 0
        self._counts = math.prod(self.shape) <= _MOST_FEATURES
        self._count = self._batches = 0
        self._state: list[Tensor] = []
        self._histogram: Tensor | None = None
        self._held: Tensor | None = None
        self._print: Tensor | None = None
        self._fresh = True

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """One more batch."""
        self.rows = len(tensor)
        rows = tensor[: max(1, _MOST // max(1, math.prod(self.shape)))]
        rows = rows.reshape(-1, 1) if self.flat else rows.reshape(len(rows), -1)
        values = rows.to(torch.promote_types(rows.dtype, torch.float32) if rows.is_floating_point() else torch.float32)
        self._compare(tensor, values)
        variance, mean = torch.var_mean(values, 0, correction=0)
        skipped = values == _IGNORED if self.whole else torch.zeros_like(values, dtype=torch.bool)
        low = torch.where(skipped, math.inf, values).amin()
        high = torch.where(skipped, -math.inf, values).amax()
        ignored = skipped.float().mean()
        entropy, odd = self._counted(values)
        apart = (values - values.median(0).values).abs()
        bent = torch.where(apart < 1.0, 0.5 * apart.square(), apart - 0.5).mean()
        new = [mean, variance * len(values), low, high, ignored, entropy, odd, variance.mean(), apart.mean(), bent]
        self._state = new if not self._state else self._merged(new, len(values))
        self._count += len(values)
        self._batches += 1

    def _merged(self, new: list[Tensor], count: int) -> list[Tensor]:
        mean, squares, low, high, ignored, entropy, odd, within, apart, bent = self._state
        total = self._count + count
        gap = new[0] - mean
        return [
            mean + gap * (count / total),
            squares + new[1] + gap.square() * (self._count * count / total),
            torch.minimum(low, new[2]),
            torch.maximum(high, new[3]),
            ignored + new[4],
            entropy + new[5],
            torch.maximum(odd, new[6]),
            within + new[7],
            apart + new[8],
            bent + new[9],
        ]

    def _counted(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Entropy of the values of this batch, and 1 where they are no small whole numbers."""
        if not self._counts:
            return values.new_zeros(()), values.new_ones(())
        flat = values.flatten()[:_MOST]
        small = (flat >= 0) & (flat < _BINS - 1) & (flat == flat.round())
        counts = values.new_zeros(_BINS).index_add_(
            0, torch.where(small, flat, _BINS - 1).long(), torch.ones_like(flat)
        )
        odd = (~small & (flat != _IGNORED)).any().to(values.dtype)
        counts = counts[:-1]
        self._histogram = counts if self._histogram is None else self._histogram + counts
        return _entropy(counts), odd

    def _compare(self, tensor: Tensor, values: Tensor) -> None:
        """With the batch before: the same numbers, in the same memory or not."""
        if self._batches < _KEPT:
            held, self._held = self._held, tensor
            self._fresh = self._fresh and (held is None or held.data_ptr() != tensor.data_ptr())
        else:
            self._held = None
        places = torch.arange(values.numel(), device=values.device, dtype=values.dtype)
        mark = (values.flatten() * places.cos()).sum()
        if self._print is None:
            self._print = torch.stack((mark, mark.new_ones(())))
        else:
            self._print[1] *= (mark == self._print[0]).to(mark.dtype)

    @torch.no_grad()
    def pending(self) -> Tensor:
        """All numbers of this part, flat."""
        mean, squares, low, high, ignored, entropy, odd, within, apart, bent = self._state
        assert self._print is not None
        variance = squares / self._count
        overall = mean.mean()
        total = (variance + (mean - overall).square()).mean()
        pooled = _entropy(self._histogram) if self._histogram is not None else mean.new_zeros(())
        scale = 1.0 / self._batches
        numbers = [overall, total, low, high, ignored * scale, entropy * scale, odd, within * scale]
        kinds = mean.new_zeros(()) if self._histogram is None else (self._histogram > 0).sum().to(mean.dtype)
        return torch.stack(
            [*numbers, variance.mean(), pooled, self._print[1], apart * scale, bent * scale, kinds, _binary(mean)]
        )

    def read(self, host: Iterator[float]) -> BatchPartStats:
        """The record, from the numbers of `pending`."""
        numbers = tuple(islice(host, _NUMBERS))
        (
            mean,
            total,
            low,
            high,
            ignored,
            within_entropy,
            odd,
            within,
            variance,
            pooled,
            same,
            apart,
            bent,
            kinds,
            binary,
        ) = numbers
        return BatchPartStats(
            name=self.name,
            whole=self.whole,
            rows=self.rows,
            shape=self.shape,
            mean=mean,
            std=math.sqrt(total) if total >= 0.0 else math.nan,
            smallest=low,
            largest=high,
            variance=variance,
            within=within / variance if variance > 0.0 else math.nan,
            deviation=apart,
            huber=bent,
            entropy=math.nan if odd else pooled,
            entropy_within=math.nan if odd else within_entropy,
            ignored=ignored,
            values=0 if odd else int(kinds),
            binary=binary,
            repeated=bool(same) and self._fresh and self._batches > 1,
        )


@final
class Copies:
    """Whether a feature of what the model is given is what it should predict; of labels, up to a factor and an offset.

    Of a sequence only the last position counts: to recall an earlier one is a task.
    """

    def __init__(self) -> None:
        self._least: Tensor | None = None
        self._seen = 0

    @torch.no_grad()
    def add(self, given: Tensor, target: Tensor) -> None:
        """One more batch."""
        sequence = given.dim() == 3
        given = given[:, -1] if sequence else given
        if not given.is_floating_point() or given.dim() != 2 or len(given) != len(target) < 1 << 14 or len(given) < 8:
            return
        rows, wanted = given.float(), target.reshape(len(target), -1).float()
        if wanted.shape[1] != 1 or not (1 if sequence else 2) <= rows.shape[1] <= _MOST_COPIES:
            return
        # why equal: a noise-free toy may be a multiple of one feature; a label that is one is no accident
        equal = ((rows - wanted).abs().amax(0) <= 1e-6 * wanted.abs().amax()).float() * (wanted.std() > 0.0)
        labels = (wanted == wanted.round()).all()
        rows, wanted = rows - rows.mean(0), wanted - wanted.mean(0)
        sizes = rows.square().sum(0) * wanted.square().sum(0)
        found = torch.where(labels, (rows * wanted).sum(0).abs() * sizes.clamp(min=1e-30).rsqrt(), equal)
        if self._least is None or self._least.shape == found.shape:
            self._least = found if self._least is None else torch.minimum(found, self._least)
            self._seen += 1

    def pending(self, home: torch.device) -> Tensor:
        """The correlation of the feature that goes best with the target in every batch, and its place."""
        if self._least is None or self._seen < 3:
            return torch.zeros(2, device=home)
        best = self._least.max(0)
        return torch.stack((best.values, best.indices.to(best.values.dtype))).float().to(home)

    @staticmethod
    def read(correlation: float, place: float) -> str:
        """In words; empty where there is none."""
        return f"feature {place:.0f} of the input" if correlation >= _COPY else ""


@final
class BatchStatistics:
    """Measures the first batches and then those that are `due`; delivers its record at each of the latter."""

    def __init__(self) -> None:
        self._parts: dict[str, PartStats] = {}
        self._batches = 0
        self._shifted: Tensor | None = None
        self._closed = False
        self.waiting: list[Tensor] = []
        """One flat tensor for the next host read, when a record is due."""

    def add(self, batch: Any, step: int, *, enough: int = FIRST) -> None:
        """One more batch; nearly always this does nothing. The first record is made when there are `enough`."""
        self.waiting = []
        if self._closed or (self._batches >= enough and step & (step - 1) and step % 128):
            return
        try:
            self._add(batch, enough)
        except Exception:  # why all: a batch that cannot be measured must not cost the step
            self._closed, self.waiting = True, []

    def _add(self, batch: Any, enough: int) -> None:
        tensors = batch_tensors(batch)
        if not self._batches:
            self._parts = {name: PartStats(name, tensor) for name, tensor in tensors}
        known = {name: tensor for name, tensor in tensors if name in self._parts}
        if len(known) != len(self._parts) or not known:
            self._closed = True
            return
        for name, tensor in known.items():
            part = self._parts[name]
            if tuple(tensor.shape[1:]) != part.shape and not part.flat:
                part = self._parts[name] = PartStats(name, tensor, flat=True)
            part.add(tensor)
        self._shift(list(known.values()))
        self._batches += 1
        if self._batches >= enough:
            pending = [part.pending() for part in self._parts.values()]
            home = pending[0].device
            shifted = pending[0].new_zeros(1) if self._shifted is None else self._shifted.reshape(1).to(pending[0])
            self.waiting = [torch.cat([*(numbers.float().to(home) for numbers in pending), shifted.float()])]

    @torch.no_grad()
    def _shift(self, tensors: list[Tensor]) -> None:
        """Whether the last tensor holds the next token of the first."""
        first, last = tensors[0], tensors[-1]
        whole = not first.is_floating_point() and not last.is_floating_point()
        if len(tensors) < 2 or first.shape != last.shape or not whole or first.dim() != 2 or first.shape[1] < 4:
            return
        same = (first[:, 1:] == last[:, :-1]).all().float()
        self._shifted = same if self._shifted is None else self._shifted * same

    def read(self, values: Sequence[float]) -> BatchStats:
        """The record, from the numbers that were waiting."""
        self.waiting = []
        host = iter(values)
        parts = tuple(part.read(host) for part in self._parts.values())
        return BatchStats(batches=self._batches, parts=parts, shifted=next(host) == 1.0)


def _binary(means: Tensor) -> Tensor:
    shares = means.clamp(0.0, 1.0)
    entropy: Tensor = (torch.special.entr(shares) + torch.special.entr(1.0 - shares)).mean()
    return entropy


def _entropy(counts: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(counts / counts.sum().clamp(min=1.0)).sum()
    return entropy
