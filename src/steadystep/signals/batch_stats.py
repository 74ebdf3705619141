"""The tensors of the batches: how they vary inside a batch and from batch to batch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from steadystep._utils.tree import is_readable, tensors_in
from steadystep.records import BatchPartStats, BatchStats

FIRST = 16
"""Batches at the start that are all measured."""
_KEPT = 8  # batches whose tensors are held for one step, to tell a new tensor from the same one
_MOST_PARTS = 6
_MOST = 1 << 16  # elements of one tensor that are measured
_MOST_FEATURES = 1 << 12  # of a row whose values are counted
_BINS = 1023
_IGNORED = -100
_NUMBERS = 18
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
    """Running statistics of one tensor of the batch, on its device.

    What a record has shown to be settled is not measured again: values that are no labels, rows that are no shares,
    batches that differ. So a look has half of the launches of the first ones, with the same numbers.
    """

    def __init__(self, name: str, tensor: Tensor, *, flat: bool = False) -> None:
        """`flat`: all values are one feature, as where the length differs from batch to batch."""
        self.name = name
        self.whole = not tensor.is_floating_point()
        self.shape = tuple(tensor.shape[1:])
        self.flat = flat
        self.rows = 0
        self._count = self._batches = 0
        self._labels = math.prod(self.shape) <= _MOST_FEATURES  # until a value is seen that is none
        self._shares = True  # until a row is seen that does not add up to 1
        self._unit = True  # until a value is seen that is not in [0, 1]
        self._same = True  # until a batch differs from the first
        self._moments: tuple[Tensor, Tensor] | None = None
        self._sums = self._ends = self._zero = self._nan = torch.zeros(())
        self._histogram: Tensor | None = None
        self._held: Tensor | None = None
        self._print: tuple[Tensor, Tensor] | None = None
        self._fresh = True
        self._marks: list[Tensor] = []
        self._marked = 0
        self._distinct: Tensor | None = None
        self._pending: Tensor | None = None

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """One more batch."""
        self.rows = len(tensor)
        rows = tensor[: max(1, _MOST // max(1, math.prod(self.shape)))]
        rows = rows.reshape(-1, 1) if self.flat else rows.reshape(len(rows), -1)
        values = rows if rows.dtype is torch.float64 else rows.float()
        if not self._batches:
            self._zero, self._nan = values.new_zeros(()), values.new_full((), math.nan)
        self._compare(tensor, values)
        self._mark(values)
        variance, mean = torch.var_mean(values, 0, correction=0)
        low, high, ignored = self._range(values)
        entropy, labels = self._counted(values)
        middle = values.median(0).values.expand_as(values)
        apart, bent = (values - middle).abs().mean(), functional.huber_loss(values, middle)
        conditional = _row_entropy(values) if self._shares and values.shape[1] > 1 else self._nan
        sums = torch.stack((ignored, entropy, variance.mean(), apart, bent, conditional))
        self._merge(mean, variance * len(values), sums, torch.stack((low, -high, labels)), len(values))

    def _merge(self, mean: Tensor, squares: Tensor, sums: Tensor, ends: Tensor, count: int) -> None:
        if self._moments is not None:
            total, gap = self._count + count, mean - self._moments[0]
            mean = self._moments[0] + gap * (count / total)
            squares = self._moments[1] + squares + gap.square() * (self._count * count / total)
            sums, ends = self._sums + sums, torch.minimum(self._ends, ends)
        self._moments, self._sums, self._ends, self._pending = (mean, squares), sums, ends, None
        self._count += count
        self._batches += 1

    def _range(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Smallest, largest, and the share of what is ignored, which counts as neither."""
        if not self.whole:
            return *torch.aminmax(values), self._zero
        skipped = values == _IGNORED
        low, high = values.masked_fill(skipped, math.inf).amin(), values.masked_fill(skipped, -math.inf).amax()
        return low, high, skipped.mean(dtype=values.dtype)

    def _counted(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Entropy of the values of this batch, and 0 where they are no small whole numbers."""
        if not self._labels:
            return self._zero, self._zero
        flat = values.flatten()[:_MOST]
        index = flat.long().clamp_(0, _BINS - 1)  # what it is not equal to is no label, be it NaN or infinite
        small = index == flat
        counts = values.new_zeros(_BINS).index_add_(0, index, small.to(values.dtype))
        self._histogram = counts if self._histogram is None else self._histogram + counts
        return _entropy(counts), (small | (flat == _IGNORED)).all()

    def _compare(self, tensor: Tensor, values: Tensor) -> None:
        """With the first batch: the same numbers, in the same memory or not."""
        if self._batches < _KEPT:
            held, self._held = self._held, tensor
            self._fresh = self._fresh and (held is None or held.data_ptr() != tensor.data_ptr())
        else:
            self._held = None
        if not self._same:
            return
        places = torch.arange(values.numel(), device=values.device, dtype=values.dtype)
        mark = (values.flatten() * places.cos()).sum()
        first, same = (mark, mark == mark) if self._print is None else self._print
        self._print = first, same & (mark == first)

    def _mark(self, values: Tensor) -> None:
        """Remember each row of the first batches by one number."""
        if not self._fresh or self._batches >= FIRST or self._marked + len(values) > _MOST_ROWS:
            return  # the same tensor again, as with the whole data set in one batch, holds no further samples
        places = torch.arange(1, values.shape[1] + 1, device=values.device, dtype=values.dtype)
        self._marks.append((values * places.sqrt().cos()).sum(1) if values.shape[1] > 1 else values.flatten())
        self._marked += len(values)
        self._distinct = None

    def _different(self) -> Tensor:
        """How often the next row is another one, once they are sorted."""
        if self._distinct is None:
            marks = torch.cat(self._marks).sort().values  # why not unique: it would wait for the device
            self._distinct = (marks[1:] != marks[:-1]).sum()
        return self._distinct

    @torch.no_grad()
    def pending(self) -> Tensor:
        """All numbers of this part, flat."""
        if self._pending is not None:
            return self._pending
        assert self._moments is not None
        mean, squares = self._moments
        zero, variance, overall = self._zero, squares / self._count, mean.mean()
        total = (variance + (mean - overall).square()).mean()
        marginal, binary = self._entropies(mean) if self._unit or self._shares else (zero, zero)
        counts = self._histogram if self._labels else None
        pooled, kinds = (zero, zero) if counts is None else (_entropy(counts), (counts > 0).sum())
        same = zero if self._print is None else self._print[1]
        different = self._different() if self._marks else zero
        numbers = [overall, total, variance.mean(), pooled, kinds, same, binary, different, marginal]
        self._pending = torch.cat((torch.stack(numbers), self._sums * (1.0 / self._batches), self._ends))
        return self._pending

    @staticmethod
    def _entropies(mean: Tensor) -> tuple[Tensor, Tensor]:
        """Of the means as shares of one whole, and as one share each."""
        shares = mean.clamp(0.0, 1.0)
        entropy = torch.special.entr(shares)
        return entropy.sum(), (entropy + torch.special.entr(1.0 - shares)).mean()

    def read(self, host: Iterator[float]) -> BatchPartStats:
        """The record, from the numbers of `pending`."""
        mean, total, variance, pooled, kinds, same, binary, distinct, marginal, *rest = islice(host, _NUMBERS)
        ignored, within_entropy, within, apart, bent, conditional, low, high, labels = rest
        self._settle(bool(labels), not math.isnan(conditional), low >= 0.0 and high >= -1.0, bool(same))
        return BatchPartStats(
            name=self.name,
            whole=self.whole,
            rows=self.rows,
            shape=self.shape,
            mean=mean,
            std=math.sqrt(total) if total >= 0.0 else math.nan,
            smallest=low,
            largest=-high,
            variance=variance,
            within=within / variance if variance > 0.0 else math.nan,
            deviation=apart,
            huber=bent,
            entropy=pooled if labels else math.nan,
            entropy_within=within_entropy if labels else math.nan,
            ignored=ignored,
            values=int(kinds) if labels else 0,
            binary=binary if self._unit else math.nan,
            repeated=bool(same) and self._fresh and self._batches > 1,
            counted=self._marked,
            distinct=int(distinct) + bool(self._marks),
            marginal=math.nan if math.isnan(conditional) else marginal,
            conditional=conditional,
        )

    def _settle(self, labels: bool, shares: bool, unit: bool, same: bool) -> None:
        """What cannot become true again."""
        self._labels, self._shares, self._unit, self._same = labels, shares, unit, same
        self._histogram = self._histogram if labels else None
        self._print = self._print if same else None


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

    def add(
        self, batch: Any, step: int, *, enough: int = FIRST, measured: Mapping[str, PartStats] | None = None
    ) -> None:
        """One more batch; nearly always this does nothing.

        Args:
            batch: anything with tensors in it.
            step: whose it is.
            enough: how many make the first record.
            measured: parts that have seen this batch and all before it.
        """
        self.waiting = []
        if self._closed or (self._batches >= enough and step.bit_count() > 1 and step % 128):
            return
        try:
            self._add(batch, enough, measured or {})
        except Exception:  # why all: a batch that cannot be measured must not cost the step
            self._closed, self.waiting = True, []

    def _add(self, batch: Any, enough: int, measured: Mapping[str, PartStats]) -> None:
        tensors = batch_tensors(batch)
        if not self._batches:
            self._parts = {name: PartStats(name, tensor) for name, tensor in tensors}
        known = {name: tensor for name, tensor in tensors if name in self._parts}
        if len(known) != len(self._parts) or not known:
            self._closed = True
            return
        for name, tensor in known.items():
            part = self._parts[name]
            if name in measured:
                self._parts[name] = measured[name]
                continue
            if tuple(tensor.shape[1:]) != part.shape and not part.flat:
                part = self._parts[name] = PartStats(name, tensor, flat=True)
            part.add(tensor)
        self._shift(list(known.values()))
        self._batches += 1
        if self._batches >= enough:
            pending = [part.pending() for part in self._parts.values()]
            home = pending[0].device
            shifted = [] if self._shifted is None else [self._shifted.reshape(1).to(pending[0])]
            self.waiting = [torch.cat([numbers.float().to(home) for numbers in (*pending, *shifted)])]

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
        return BatchStats(batches=self._batches, parts=parts, shifted=next(host, 0.0) == 1.0)


def _row_entropy(values: Tensor) -> Tensor:
    """Mean entropy of the rows; NaN where they are not shares that add up to 1."""
    shares = ((values >= 0.0).all(1) & ((values.sum(1) - 1.0).abs() < 1e-3)).all()
    entropy: Tensor = torch.special.entr(values.clamp(0.0, 1.0)).sum(1).mean()
    return torch.where(shares, entropy, math.nan)


def _entropy(counts: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(counts / counts.sum().clamp(min=1.0)).sum()
    return entropy
