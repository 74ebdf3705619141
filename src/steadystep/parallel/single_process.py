"""What the guard asks of the other ranks, and the null object for a run that has none."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, final

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep.parallel.stages import Stages

if TYPE_CHECKING:
    from steadystep.parallel.replicas import StandIn
    from steadystep.signals.gradients import GradientView

Sections = Mapping[str, Mapping[str, str]]

AskRank = Callable[[], bool]
RankAction = Callable[[], None]
NamedTensors = Callable[[], tuple[tuple[str, ...], tuple[Tensor, ...]]]
"""All parameters of the optimizer, with names; the same objects while nothing changes."""

_NOTHING = nullcontext()


class Ranks(Protocol):
    """All processes of one training run. Everything but `agree` is for trouble, validation and checkpoints."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def sharded(self) -> bool:
        """Parameters are spread over the ranks: a forward pass needs all of them."""
        ...

    @property
    def stages(self) -> Stages | None:
        """Those of a pipeline that run here; None without one."""
        ...

    @property
    def stand_in(self) -> "StandIn | None":
        """What this rank sends for a pass that failed here alone; None without others."""
        ...

    @property
    def agreements(self) -> int:
        """How often `agree` was called."""
        ...

    def watch(self, named: NamedTensors, buffers: Sequence[str], *, micro_batches: int) -> None:
        """Say what is measured, once, before the first `agree`."""
        ...

    def agree(self, view: "GradientView") -> "GradientView":
        """The one collective of a step: afterwards `look.signals` is the same on every rank."""
        ...

    def any_rank(self, wanted: AskRank) -> AskRank:
        """Something that happens on all ranks once one wants it; the result tells whether that is agreed.

        It is asked at each `agree`, so all ranks must make the same wishes in the same order, before the first one.
        """
        ...

    def on_all(self, act: RankAction, when: AskRank = bool) -> RankAction:
        """To be called by any rank: all of them then do `act`, within the next `agree`. Made as a wish is.

        They also do where `when` is true on one of them.
        """
        ...

    def all(self, flag: bool) -> bool:
        """True when it is true on every rank."""
        ...

    def same(self, thing: object) -> bool:
        """Whether all ranks say the same of it, by its `repr`."""
        ...

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Each averaged over the ranks."""
        ...

    def mean_loss(self, losses: Sequence[float]) -> list[float]:
        """Each averaged over the ranks that have a loss; the others give 0, or infinity to refuse it."""
        ...

    def norms(self, names: Sequence[str], norms: Sequence[float]) -> dict[str, float]:
        """Norms over all ranks of parameters, from those of the parts here; none where a rank could not measure."""
        ...

    def least(self, number: float) -> float:
        """The smallest of all ranks."""
        ...

    def validation(self, loss: float) -> float:
        """The mean over the ranks that have one; NaN stands for having none."""
        ...

    def texts(self, text: str) -> list[str]:
        """What every rank says, cut to a kilobyte."""
        ...

    def compare(self, sections: Sections, *, wrong: str = "") -> str:
        """What differs between the ranks, or what is wrong on one of them, in the same words everywhere; else ""."""
        ...

    def copy_from(self, rank: int, optimizer: Optimizer) -> None:
        """Give every rank the weights and moments of that one."""
        ...

    def reshard(self) -> None:
        """Bring the model into the form it has between two steps, whatever a validation has left behind."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Around a forward pass that is run again: it must leave the wrapper as it was."""
        ...

    def together(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A closure that is run again: by all ranks, or by none where it fails on one of them."""
        ...

    @property
    def adds_up(self) -> bool:
        """Gradients of several passes can be added up on each rank, and averaged with the last one."""
        ...

    def unreduced(self) -> AbstractContextManager[None]:
        """Around the passes before the last one of an update, where `adds_up`: their gradients stay here."""
        ...

    def average_(self, parameters: Sequence[Parameter]) -> None:
        """Average gradients that no pass has: the group ended before its last one."""
        ...


@final
class SingleProcess:
    """One process: it agrees with itself, at no cost."""

    rank, size, sharded, agreements = 0, 1, False, 0
    stages: Stages | None = None
    stand_in: "StandIn | None" = None

    def watch(self, named: NamedTensors, buffers: Sequence[str], *, micro_batches: int) -> None:
        """Nobody else has to know."""

    def agree(self, view: "GradientView") -> "GradientView":
        """As it is."""
        return view

    def any_rank(self, wanted: AskRank) -> AskRank:
        """Granted at once."""
        return wanted

    def on_all(self, act: RankAction, when: AskRank = bool) -> RankAction:
        """Done at once."""
        return act

    def all(self, flag: bool) -> bool:
        """As it is."""
        return flag

    def same(self, thing: object) -> bool:
        """There is nobody to differ from."""
        return True

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """As they are."""
        return list(numbers)

    def mean_loss(self, losses: Sequence[float]) -> list[float]:
        """As they are."""
        return list(losses)

    def norms(self, names: Sequence[str], norms: Sequence[float]) -> dict[str, float]:
        """As they are."""
        return dict(zip(names, norms, strict=True))

    def least(self, number: float) -> float:
        """As it is."""
        return number

    def validation(self, loss: float) -> float:
        """As it is."""
        return loss

    def texts(self, text: str) -> list[str]:
        """As it is."""
        return [text]

    def compare(self, sections: Sections, *, wrong: str = "") -> str:
        """There is nobody to differ from."""
        return wrong

    def copy_from(self, rank: int, optimizer: Optimizer) -> None:
        """It has them."""

    def reshard(self) -> None:
        """It has no other form."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to keep quiet."""
        return _NOTHING

    def together(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """As it is."""
        return work

    adds_up = False

    def unreduced(self) -> AbstractContextManager[None]:
        """Nothing is ever sent."""
        return _NOTHING

    def average_(self, parameters: Sequence[Parameter]) -> None:
        """They are as they should be."""
