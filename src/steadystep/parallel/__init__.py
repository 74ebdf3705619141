"""Agreement between ranks: every rank decides from the same numbers, so every rank decides the same.

Which ranks a run has is found from the process group and from how the model is wrapped.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

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
