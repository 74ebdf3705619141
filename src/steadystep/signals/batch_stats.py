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
_NUMBERS = 19
_MOST_ROWS = 1 << 12  # that are compared with each other


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
        self._marks: list[Tensor] = []
        self._marked = 0

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """One more batch."""
        self.rows = len(tensor)
        rows = tensor[: max(1, _MOST // max(1, math.prod(self.shape)))]
        rows = rows.reshape(-1, 1) if self.flat else rows.reshape(len(rows), -1)
        values = rows.to(torch.promote_types(rows.dtype, torch.float32) if rows.is_floating_point() else torch.float32)
        self._compare(tensor, values)
        self._mark(values)
        variance, mean = torch.var_mean(values, 0, correction=0)
        skipped = values == _IGNORED if self.whole else torch.zeros_like(values, dtype=torch.bool)
        low = torch.where(skipped, math.inf, values).amin()
        high = torch.where(skipped, -math.inf, values).amax()
        ignored = skipped.float().mean()
        entropy, odd = self._counted(values)
        apart = (values - values.median(0).values).abs()
        bent = torch.where(apart < 1.0, 0.5 * apart.square(), apart - 0.5).mean()
        new = [mean, variance * len(values), low, high, ignored, entropy, odd, variance.mean(), apart.mean(), bent]
        new.append(_row_entropy(values))
        self._state = new if not self._state else self._merged(new, len(values))
        self._count += len(values)
        self._batches += 1

    def _merged(self, new: list[Tensor], count: int) -> list[Tensor]:
        mean, squares, low, high, ignored, entropy, odd, within, apart, bent, rows = self._state
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
            rows + new[10],
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

    def _mark(self, values: Tensor) -> None:
        """Remember each row of the first batches by one number."""
        if not self._fresh or self._batches >= FIRST or self._marked + len(values) > _MOST_ROWS:
            return  # the same tensor again, as with the whole data set in one batch, holds no further samples
        places = torch.arange(1, values.shape[1] + 1, device=values.device, dtype=values.dtype)
        self._marks.append((values * places.sqrt().cos()).sum(1) if values.shape[1] > 1 else values.flatten())
        self._marked += len(values)

    def _distinct(self) -> Tensor:
        marks = torch.cat(self._marks).sort().values  # why not unique: it would wait for the device
        return (marks[1:] != marks[:-1]).sum() + 1

    @torch.no_grad()
    def pending(self) -> Tensor:
        """All numbers of this part, flat."""
        mean, squares, low, high, ignored, entropy, odd, within, apart, bent, rows = self._state
        assert self._print is not None
        variance = squares / self._count
        overall = mean.mean()
        total = (variance + (mean - overall).square()).mean()
        pooled = _entropy(self._histogram) if self._histogram is not None else mean.new_zeros(())
        scale = 1.0 / self._batches
        numbers = [overall, total, low, high, ignored * scale, entropy * scale, odd, within * scale]
        kinds = mean.new_zeros(()) if self._histogram is None else (self._histogram > 0).sum().to(mean.dtype)
        more = [variance.mean(), pooled, self._print[1], apart * scale, bent * scale, kinds, _binary(mean)]
        different = self._distinct().to(mean.dtype) if self._marks else mean.new_zeros(())
        more += [mean.new_tensor(self._marked), different, torch.special.entr(mean.clamp(0.0, 1.0)).sum(), rows * scale]
        return torch.stack([*numbers, *more])

    def read(self, host: Iterator[float]) -> BatchPartStats:
        """The record, from the numbers of `pending`."""
        mean, total, low, high, ignored, within_entropy, odd, within, variance, *rest = islice(host, _NUMBERS)
        pooled, same, apart, bent, kinds, binary, counted, distinct, marginal, conditional = rest
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
            counted=int(counted),
            distinct=int(distinct),
            marginal=math.nan if math.isnan(conditional) else marginal,
            conditional=conditional,
        )


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
        if len(tensors) < 2 or not whole or first.dim() != 2 or first.shape[1] < 4:
            return
        if last.numel() not in (first.numel(), first.numel() - len(first)):  # it may be flat, and end one before
            return
        last = last.reshape(len(first), -1)[:, : first.shape[1] - 1]
        same = (first[:, 1:] == last).all().float()
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


def _row_entropy(values: Tensor) -> Tensor:
    """Mean entropy of the rows; NaN where they are not shares that add up to 1."""
    if values.shape[1] < 2:
        return values.new_full((), math.nan)
    shares = ((values >= 0.0).all(1) & ((values.sum(1) - 1.0).abs() < 1e-3)).all()
    entropy: Tensor = torch.special.entr(values.clamp(0.0, 1.0)).sum(1).mean()
    return torch.where(shares, entropy, math.nan)


def _entropy(counts: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(counts / counts.sum().clamp(min=1.0)).sum()
    return entropy
