"""One loader for several ranks: every rank gets other batches of the same data."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, final

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler


def split(loader: Iterable[Any], rank: int, size: int, *, seed: int) -> Iterable[Any]:
    """This rank's share: by torch's DistributedSampler where the loader draws from a set, else every n-th batch."""
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        return loader
    if _can_be_sampled(loader):
        return ByEpochs(loader, rank, size, seed=seed)
    return EveryNth(loader, rank, size)


@final
class ByEpochs:
    """A DataLoader over this rank's share of a set, shuffled anew in every epoch if the original was."""

    def __init__(self, loader: Any, rank: int, size: int, *, seed: int) -> None:
        shuffled = isinstance(loader.sampler, RandomSampler)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, size, rank, shuffle=shuffled, seed=seed, drop_last=loader.drop_last
        )
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        )

    def begin(self, epoch: int) -> None:
        """The order of an epoch follows from its number, so that a resumed run has it too."""
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


@final
class EveryNth:
    """Whatever gives batches: this rank takes every n-th, and all take equally many."""

    def __init__(self, loader: Iterable[Any], rank: int, size: int) -> None:
        self._loader, self._rank, self._size = loader, rank, size

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._loader)
        while len(turn := list(islice(source, self._size))) == self._size:
            yield turn[self._rank]


def _can_be_sampled(loader: Iterable[Any]) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and isinstance(loader.sampler, RandomSampler | SequentialSampler)
    )
