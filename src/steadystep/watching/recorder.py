"""Keeps, for each backward pass of a loop, how its loss came about: so that an update can be replayed."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steadystep._utils.modules import data_parallel_of
from steadystep._utils.rng import RngState
from steadystep._utils.text import note
from steadystep.config import Config
from steadystep.engine.closures import TapedClosure
from steadystep.engine.microbatch_group import Draws, draws
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.ownership import reevaluates
from steadystep.optimizers import Trained
from steadystep.parallel import Ranks
from steadystep.signals.activations import SilentHook
from steadystep.snapshots.placement import without_replay
from steadystep.snapshots.replay_buffer import RecordedMicroBatch
from steadystep.watching.tape import Tape, TapeMode

_FAILURES = 8  # passes in a row that could not be kept: then this loop is not one that can be


@final
class Recorder:
    """Hooks around the model's forward pass. Costs a few references per pass, and a call per function of the loss.

    A loop in which backward is not the end of one forward pass (two passes of the model for one loss, another network
    that learns, gradients of gradients) is not kept, and after a few such passes no longer listened to.
    """

    def __init__(self, model: nn.Module, trained: Trained, device: torch.device) -> None:
        self._model = model
        self._trained = trained
        self._device = device
        self._draws = Draws(device, by_modules=draws(model))
        self._failures = 0
        self._tape: Tape | None = None
        self._mode: TapeMode | None = None
        self._works: list[RecordedMicroBatch] = []
        self._waiting: RecordedMicroBatch | None = None
        self._spoiled = False
        self._known: set[int] = set()
        self.paused = False
        """The guard itself is running the model."""
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(SilentHook(self._begin), with_kwargs=True, prepend=True),
            model.register_forward_hook(SilentHook(self._end)),
        ]

    def remove(self) -> None:
        """The model is as it was."""
        self.hush()
        self._tape = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def hush(self) -> None:
        """Listen to the loop no more, until the next forward pass."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.pop()

    def before_backward(self, loss: Tensor, *, plainly: bool) -> None:
        """`plainly`: it is asked for nothing but the gradients of all that led to `loss`."""
        if self.paused:
            return
        tape, self._tape = self._tape, None
        self._waiting = None
        if tape is None or not plainly:
            return
        try:
            closed = tape.close(loss)
        except Exception:  # a tensor without what tensors have; backward is the loop's all the same
            return
        if not closed:
            return
        self._draws.after(last=True)
        self._waiting = RecordedMicroBatch(TapedClosure(tape.run, tape.held, tape.rng), None)

    def after_backward(self, *, ours: bool, cleared: bool) -> None:
        """Whether it changed gradients of this model, and whether those of earlier passes had been cleared before."""
        if self.paused:
            return
        if cleared:
            self._works, self._spoiled = [], False
        if not ours:
            return
        if self._waiting is None:
            self._spoiled = True
            self._failures += 1
            if self._failures >= _FAILURES:
                self.remove()
            return
        self._failures = 0
        self._works.append(self._waiting)
        self._waiting = None

    def micro_batches(self, passes: int) -> tuple[RecordedMicroBatch, ...]:
        """What it takes to compute the gradients of this step again, which came from so many passes."""
        return tuple(self._works) if len(self._works) == passes and not self._spoiled else ()

    def clear(self) -> None:
        """The step is over."""
        self._works, self._spoiled = [], False

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.paused or not model.training or not torch.is_grad_enabled() or _is_transformed():
            return
        self.hush()
        if self._tape is not None:  # two passes for one loss, or one for nothing
            self._spoiled = True
        self._tape = None
        self._tape = Tape(model, args, kwargs, rng=self._draws.before(), device=self._device.type, owns=self._owns)
        self._tape.whole = self._tape.whole and not self._spoiled

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.paused or self._tape is None or not self._tape.whole:
            return
        self._tape.forwarded(output)
        mode = TapeMode(self._tape)
        if mode.push():
            self._mode = mode

    def _owns(self, tensor: Tensor) -> bool:
        if id(tensor) not in self._known:
            self._known = {id(parameter) for parameter in self._trained.parameters}
        return id(tensor) in self._known


def _is_transformed() -> bool:
    """Inside `torch.func`: what is seen there are not the tensors of the loop."""
    return torch._C._functorch.peek_interpreter_stack() is not None


Again = Callable[..., Tensor]


@final
class Reruns:
    """References only, from the forward pass to the step."""

    def __init__(self) -> None:
        self._all: list[tuple[Again | None, Any, RngState | None]] = []

    def add(self, again: Again | None, batch: Any, rng: RngState | None = None) -> None:
        """One more micro-batch of this step."""
        self._all.append((again, batch, rng))

    @property
    def batches(self) -> list[Any]:
        """What was given."""
        return [batch for _, batch, _ in self._all if batch is not None]

    def show(
        self, runner: MicroBatchRunner, micro_batches: Sequence[RecordedMicroBatch], bad: Sequence[int] = ()
    ) -> None:
        """Present the first bad one, or the last: of what the loop has given, or else of what was seen of it."""
        known = self._all or [_rerun(work) for work in micro_batches]
        which = [i for i in bad if i < len(known)]
        runner.present(*known[which[0] if which else -1] if known else (None, None))

    def clear(self) -> None:
        """The step is over."""
        self._all = []


def _rerun(work: RecordedMicroBatch) -> tuple[Again | None, Any, RngState | None]:
    recipe = work.recipe
    assert isinstance(recipe, TapedClosure)
    args, kwargs, _ = recipe.batch
    batch = {"args": args, **kwargs} if kwargs else args
    return recipe.closure, args[0] if len(args) == 1 and not kwargs else batch, recipe.beginning


def why_not(optimizer: Optimizer, scaler: GradScaler | None, *, finds_loss: bool) -> str:
    """What keeps them from it, whatever the loop does; empty where nothing does."""
    if not finds_loss:
        return "the loop's backward passes are not observed (find_loss=False)"
    if scaler is not None and scaler.is_enabled():
        return "the scale of a GradScaler changes"
    if reevaluates(optimizer):
        return f"{type(optimizer).__name__} calls its closure a varying number of times"
    return ""


def why_not_on(ranks: Ranks, model: nn.Module) -> str:
    """The same, of several processes."""
    if ranks.stages is not None:
        return "watch() of a pipeline"
    if ranks.size > 1 and not ranks.sharded and data_parallel_of(model) is None:
        return "watch() of the model inside of DistributedDataParallel"
    return ""


def say_what_is_lost(config: Config, why: str) -> None:
    """At attach, once, where a rollback is possible and a replay is not."""
    if config.mode == "autopilot" and config.training.auto_recovery and config.recovery.snapshots > 0:
        note(without_replay(config.recovery.trust_steps, why))
