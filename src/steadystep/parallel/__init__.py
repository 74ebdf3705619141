"""Agreement between ranks: every rank decides from the same numbers, so every rank decides the same.

Which ranks a run has is found from the process group and from how the model is wrapped.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
import torch.distributed
from torch import Tensor, nn

from steadystep._utils.modules import data_parallel_of
from steadystep.errors import ConfigError, SteadystepError
from steadystep.parallel.messages import sections
from steadystep.parallel.single_process import AskRank, Ranks, Sections, SingleProcess
from steadystep.parallel.stages import stages_of

__all__ = [
    "Meeting",
    "Once",
    "Ranks",
    "SingleProcess",
    "Through",
    "ends_of",
    "ranks_and_model",
    "ranks_of",
    "sections",
    "without_ddp",
]


@final
class Once:
    """Asks a granted wish again only after all ranks have agreed again."""

    def __init__(self, ranks: Ranks, granted: AskRank) -> None:
        self._ranks = ranks
        self._granted = granted
        self._heard = 0

    def __call__(self) -> bool:
        """Whether it was granted since this was asked last."""
        fresh, self._heard = self._ranks.agreements != self._heard, self._ranks.agreements
        return fresh and self._granted()


class Source(Protocol):
    """Where a loop is in its data."""

    open: bool
    """A pass is under way."""

    @property
    def left(self) -> float:
        """Batches after the one that is out; infinitely many where that is not known."""
        ...


@final
class LastGroup:
    """Ends passes over loaders of different lengths after the same micro-batch, where several make an update.

    With each update a rank says whether it has too few batches left for another one. Where one has, the fewest are
    agreed on at once, and every rank takes so many more.
    """

    def __init__(self, ranks: Ranks, data: Source, size: int) -> None:
        self._ranks, self._data, self._size = ranks, data, size
        self._more: int | None = None
        self._heard = 0
        ranks.on_all(self._agree, when=lambda: data.left < size)

    def __call__(self) -> bool:
        """Whether the batch that was used is the last one; asked once after each, and before a pass."""
        fresh, self._heard = self._ranks.agreements != self._heard, self._ranks.agreements
        if not self._data.open or self._more is None:
            self._more = None  # the loop has left the last pass by itself
            return False
        self._more -= not fresh
        return self._more <= 0

    def _agree(self) -> None:
        self._more = int(self._ranks.least(min(self._data.left, self._size)))


def ends_of(ranks: Ranks, data: Source, size: int) -> AskRank:
    """Return what tells, after each batch, whether another rank has too few: `size` of them make an update."""
    if size > 1:
        return LastGroup(ranks, data, size)
    return Once(ranks, ranks.any_rank(lambda: data.left < 1))


@final
class Through(nn.Module):
    """A module whose forward pass is the loss: wrap it, and gradients are averaged over the ranks."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        return self._loss(batch)


def ranks_of(model: nn.Module) -> Ranks:
    """All ranks of the process group, if one with more than one rank was initialised; else none but this one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return SingleProcess()
    stages = stages_of(model)
    if stages is not None:  # also on a single rank: its schedule runs backward by itself
        from steadystep.parallel.process_group import ProcessGroup

        return ProcessGroup(stages, None, None)
    wrapped = data_parallel_of(model)
    group = None if wrapped is None else wrapped.process_group
    if torch.distributed.get_world_size(group) == 1:
        return SingleProcess()
    from steadystep.parallel.process_group import ProcessGroup  # why: who runs alone need not load it

    return ProcessGroup(without_ddp(model), wrapped, group)


def ranks_and_model(model: nn.Module) -> tuple[Ranks, nn.Module]:
    """The ranks, and what is trained on this one: the model itself, or its stages of a pipeline."""
    ranks = ranks_of(model)
    return ranks, without_ddp(model) if ranks.stages is None else ranks.stages


def without_ddp(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, where names are as its owner knows them; any other as it is."""
    wrapped = data_parallel_of(model)
    if wrapped is None:
        return model
    inner = wrapped.module
    assert isinstance(inner, nn.Module)
    return inner.model if isinstance(inner, Through) else inner


@final
class Meeting:
    """Held once for each guard: with what is compared, or with the mistake that kept this rank from comparing."""

    def __init__(self) -> None:
        self._over = False

    def compare(self, ranks: Ranks, sections: Sections, *, wrong: str = "") -> None:
        """Raise on every rank when one has something to say, or they differ.

        Raises:
            ConfigError: with the same words everywhere.
        """
        self._over = True
        said = ranks.compare(sections, wrong=wrong)
        if said:
            raise ConfigError(said)

    @contextmanager
    def telling(self, model: Any) -> Iterator[None]:
        """Around what may fail on this rank alone: the others are told."""
        try:
            yield
        except SteadystepError as error:
            self.fail(model, error)
            raise

    def fail(self, model: Any, error: Exception) -> None:
        """This rank could not make its guard; the others are told, unless they know."""
        if self._over:
            return
        self._over = True
        try:
            ranks = ranks_of(model)
        except Exception:  # what was given is no model: there is nobody to be found through it
            return
        nothing: Mapping[str, Mapping[str, str]] = {}
        ranks.compare(nothing, wrong=str(error) or type(error).__name__)
