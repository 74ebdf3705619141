"""Which batches an examination keeps: those of one pass over the data, so that no trial trains on held samples."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from steadystep._utils.rng import HostRandom, RngState, generator_back
from steadystep._utils.tree import tensors_in
from steadystep.examination.passes import num_rows
from steadystep.lr_finder import generators_of

MOST_BATCHES = 128
_FURTHER = 8
_FEWEST_SAMPLES = 512
_MOST_BYTES = 1 << 24
_AGAIN = 0.9  # of the samples of a batch that have been seen before: the data begins anew
_FEWEST_BATCHES = 9  # with fewer, a pass over the data is too little to hold some of it back


def taken(batches: Iterable[Any], number: int, *, most: int) -> list[Any]:
    """Batches of a loader, whose random numbers are put back."""
    with _random_numbers_back(batches):
        return one_pass(_kept(iter(batches), number, most=most))


def one_pass(batches: list[Any]) -> list[Any]:
    """The batches before the data begins anew, where there are enough of them."""
    seen: set[float] = set()
    for number, batch in enumerate(batches):
        rows = _marks(batch)
        if rows and sum(mark in seen for mark in rows) >= _AGAIN * len(rows):
            # why all of them: a whole batch in every step, or a handful of samples, is never held back
            return batches[:number] if number >= _FEWEST_BATCHES else batches
        seen.update(rows)
    return batches


def _marks(batch: Any) -> list[float]:
    """One number for each sample, the same where all of it is the same; none where samples cannot be told apart."""
    held = [t for _, t in tensors_in(batch) if t.layout is torch.strided and not t.is_nested and not t.is_complex()]
    size = max((num_rows(t) for t in held), default=0)
    if size < 2:
        return []
    marks = torch.zeros(size, dtype=torch.float64)
    for place, tensor in enumerate(t for t in held if num_rows(t) == size):
        flat = tensor.detach().reshape(size, -1).to("cpu", torch.float64)
        marks += flat @ torch.sin(1.0 + place + torch.arange(flat.shape[1], dtype=torch.float64))
    return marks.tolist() if bool(marks.isfinite().all()) else []  # sync: examined


@contextmanager
def _random_numbers_back(batches: object) -> Iterator[None]:
    """A loader draws random numbers to shuffle: those of the process, and those of its own generators."""
    states: list[HostRandom | RngState] = [HostRandom(), RngState(torch.device("cpu"))]
    own = [back for generator in generators_of(batches) if (back := generator_back(generator)) is not None]
    try:
        yield
    finally:
        for state in states:
            state.restore()
        for back in own:
            back()


def _kept(batches: Iterator[Any], number: int, most: int = 0) -> list[Any]:
    """The first batches; some from farther on where these have a single target, as with sorted data."""
    first = list(islice(batches, number))
    size = max((num_rows(t) for batch in first[:1] for _, t in tensors_in(batch)), default=0)
    if size and len(first) == number:
        first += islice(batches, max(min(_FEWEST_SAMPLES // size, 512) - number, 0))
        first += _small(batches, most - len(first))
        number = len(first)
    if len(first) < number or not _have_one_target(first):
        return first
    further = [batch for place, batch in enumerate(islice(batches, _FURTHER * number)) if place % _FURTHER == 0]
    return (first[: number // 2] + further)[: max(number, 4)] if further else first


def _small(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """More of them, while they take little memory: a trial then sees about as much data as the run."""
    room = _MOST_BYTES
    for batch in islice(batches, max(number, 0)):
        room -= sum(t.numel() * t.element_size() for _, t in tensors_in(batch))
        yield batch
        if room < 0:
            return


def _have_one_target(batches: list[Any]) -> bool:
    last = [[t for _, t in tensors_in(batch)][-1:] for batch in batches]
    targets = [t for part in last for t in part if t.dim() == 1 and not t.is_floating_point()]
    return bool(targets) and len({value for t in targets for value in torch.unique(t).tolist()}) == 1  # sync: examined
