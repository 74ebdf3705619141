"""Stages of a pipeline (`torch.distributed.pipelining`): what a rank runs of a model that no rank has whole.

    names     `stage2.layers.7.weight`: the union over all stages is gathered once, so that every rank judges all of it
    the loss  the ranks of the last stage have it; its mean over them is the loss of the step
    passes    the schedule runs forward and backward of all micro-batches itself, inside the closure

A stage knows its module, and the module nothing of its stage: stages are found among the living objects.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadystep.errors import MisuseError

PIPELINES = "torch.distributed.pipelining"
FIRST_STAGE = "stage0"
"""Where the batch enters."""


class Removable(Protocol):
    """A hook."""

    def remove(self) -> None:
        """Take it off."""
        ...


@final
class Stages(nn.Module):
    """The modules of the stages that this rank runs, by the number of their stage."""

    def __init__(self, stages: Sequence[Any]) -> None:
        super().__init__()
        self._stages = tuple(sorted(stages, key=lambda stage: int(stage.stage_index)))
        for stage in self._stages:
            self.add_module(f"stage{stage.stage_index}", _inner(stage.submod))
        self.label = " and ".join(name for name, _ in self.named_children())
        self.has_loss = any(stage.is_last for stage in stages)
        """The last stage is here."""
        self.lacks_loss = False
        """The loop has not said what the loss of this step is."""

    def loss(self, returned: Any) -> Tensor:
        """The loss as the closure returned it, or zero on a rank that has none; without its graph: backward is over."""
        if not self.has_loss:
            return torch.zeros((), device=self._device())
        if not isinstance(returned, Tensor) or returned.numel() != 1 or not returned.is_floating_point():
            raise MisuseError(
                f"the closure returned {type(returned).__name__} on the rank of the last stage: return the loss there, "
                "torch.stack(losses).mean() after schedule.step(target=..., losses=losses), and None on other ranks"
            )
        return returned.detach().reshape(())

    def given(self, losses: Sequence[Tensor]) -> Tensor:
        """The mean of what the loop has said; it is noted where it should have and has not."""
        self.lacks_loss = self.has_loss and not losses
        return torch.stack(list(losses)).mean() if self.has_loss and losses else torch.zeros((), device=self._device())

    def when_entered(self, call: Callable[..., None]) -> Removable:
        """Call back when a schedule begins to run a stage of this rank, before its first message."""
        return _Entering(self._stages, call)

    def _device(self) -> torch.device:
        return next(self.parameters()).device


@final
class _Entering:
    """A schedule clears what the last batch has left in each stage before it does anything else."""

    def __init__(self, stages: Sequence[Any], call: Callable[..., None]) -> None:
        self._stages = stages
        for stage in stages:
            vars(stage)["clear_runtime_states"] = self._calling(stage.clear_runtime_states, call)

    @staticmethod
    def _calling(clear: Callable[[], None], call: Callable[..., None]) -> Callable[[], None]:
        def cleared() -> None:
            call()
            clear()

        return cleared

    def remove(self) -> None:
        """Take it off."""
        for stage in self._stages:
            vars(stage).pop("clear_runtime_states", None)


def stages_of(model: Any) -> Stages | None:
    """The stages whose modules `model` is or contains; None without a pipeline."""
    module = sys.modules.get(f"{PIPELINES}.stage")  # who has a pipeline has imported it
    if module is None or not isinstance(model, nn.Module):
        return None
    base = module._PipelineStageBase
    inside = {id(part) for part in model.modules()}
    found: dict[int, Any] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), base):
            part = getattr(thing, "submod", None)
            if id(part) in inside or id(_inner(part)) in inside:
                found[thing.stage_index] = thing
    return Stages(list(found.values())) if found else None


def by_stage(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, by the number of its stage and else as they come.

    >>> by_stage(["stage0.b", "stage10.a", "stage2.a", "stage0.b"])
    ('stage0.b', 'stage2.a', 'stage10.a')
    """
    return tuple(sorted(dict.fromkeys(names), key=_number))


def _number(name: str) -> int:
    number = name.partition(".")[0].removeprefix("stage")
    return int(number) if number.isdecimal() else sys.maxsize


def _inner(part: Any) -> Any:
    return part.module if isinstance(part, DistributedDataParallel) else part
