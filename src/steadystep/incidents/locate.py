"""Finds the module in which a step becomes NaN or infinite, by running it again under hooks.

Nothing is hooked except while `locate` runs. Afterwards gradients, buffers and random state are what they were; weights
are never written. Compiled models are run uncompiled, because hooks do not reach into compiled code.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from steadystep._utils.modules import gradients_aside
from steadystep._utils.rng import HostRandom, RngState, random_numbers_kept
from steadystep._utils.tensors import device_of, layout_of, measure
from steadystep.errors import MisuseError
from steadystep.incidents.autograd_hooks import BackwardWatch, ForwardWatch
from steadystep.incidents.origin import (
    NaNTrace,
    Origin,
    Sick,
    badness,
    of_backward,
    of_buffers,
    of_forward,
    of_gradient,
    of_node,
    of_scaled_loss,
    of_weights,
    sick_weights,
)
from steadystep.parallel.stages import FIRST_STAGE, Stages
from steadystep.precision import Precision
from steadystep.snapshots.buffers import Buffers

if TYPE_CHECKING:
    from steadystep.engine.closures import Closure

RunAgain = Callable[[], Any]
AgreeOnBad = Callable[[bool], bool]


def locate(
    model: nn.Module,
    work: RunAgain,
    *,
    loss_of: Callable[[Any], Tensor] | None = None,
    parameters: Sequence[Parameter] | None = None,
    batch: Any = None,
    scale: float = 1.0,
) -> Origin:
    """Return the first module that produces a non-finite value, in forward or backward.

    Args:
        model: its modules are hooked while this runs.
        work: runs the forward pass and returns the loss; the caller provides autocast and the batch, and sets the
            random state before. Its exceptions are raised here.
        loss_of: extracts the loss from what `work` returns.
        parameters: parameters whose gradients count. Default: all trainable ones.
        batch: the input of `work`, to tell bad data from a bad loss function.
        scale: the loss scale in use, on which the overflow of an fp16 gradient depends.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> with torch.no_grad():
    ...     for p in model.parameters():
    ...         _ = p.fill_(1e30)
    >>> locate(model, lambda: model(torch.ones(4, 2)).mean()).module
    '2'
    """
    return trace_step(model, work, loss_of=loss_of, parameters=parameters, batch=batch, scale=scale).origin


def trace_step(
    model: nn.Module,
    work: RunAgain,
    *,
    loss_of: Callable[[Any], Tensor] | None = None,
    parameters: Sequence[Parameter] | None = None,
    batch: Any = None,
    scale: float = 1.0,
    agree: AgreeOnBad | None = None,
    sharded: bool = False,
    stages: Stages | None = None,
) -> NaNTrace:
    """Run a step again under hooks and return its origin, loss and gradient norm.

    Takes the arguments of `locate`, and `agree` on several ranks: all of them call it, each with its own batch, and
    `agree` tells whether a flag is true on every rank, so that all run the backward pass or none does: parameters may
    be `sharded`, and a model may send messages of its own. In a pipeline, of whose `stages` some are here, `work` runs
    backward too.
    """
    trained = [p for p in (model.parameters() if parameters is None else parameters) if p.requires_grad]
    sick = sick_weights(model)
    run = _TracedRun(model, work, loss_of, trained, batch, scale, sick, agree, sharded, stages)
    with _eagerly(), _nothing_changed(model, trained) as rng:
        try:
            found = run(through_grad=not sharded)  # a sharded gradient comes into being under backward() only
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            # why: re-entrant checkpointing works under backward() only, which also calls hooks of the user's
            rng.restore()
            found = run(through_grad=False)
    weights = of_weights(model, sick) if found.finite else None
    return found if weights is None else replace(found, origin=weights)


@final
@dataclass(frozen=True, slots=True)
class _TracedRun:
    """One forward and backward pass under hooks."""

    model: nn.Module
    work: RunAgain
    loss_of: Callable[[Any], Tensor] | None
    trained: Sequence[Parameter]
    batch: Any
    scale: float
    sick: Sick
    agree: AgreeOnBad | None = None
    sharded: bool = False
    stages: Stages | None = None

    def __call__(self, *, through_grad: bool) -> NaNTrace:
        watch = ForwardWatch(self.model)
        if self.stages is not None:
            return self._scheduled(watch, self.stages)
        with watch.watching():
            loss = self._loss(self.work())
            value = float(loss.detach())  # sync: only in trouble
            goes_on = self.agree is None or self.agree(math.isfinite(value * self.scale))
            if not math.isfinite(value):
                origin = of_forward(self.model, watch, self.sick, self.batch, loss=loss)
                return NaNTrace(origin=origin, loss=value)
            scaled = loss if self.scale == 1.0 else loss * self.scale
            if not math.isfinite(float(scaled.detach())):  # sync: only in trouble
                return NaNTrace(origin=of_scaled_loss(self.scale), loss=value)
            if not goes_on:
                return NaNTrace(origin=of_buffers(self.model, self.sick) or Origin(), loss=value)
            back = BackwardWatch(watch)
            watch.judging, watch.recomputed = False, back.attach
            try:
                back.attach([scaled])
                grads = self._gradients(scaled, through_grad=through_grad)
            finally:
                back.remove()
        if self.sharded:  # what arrived from other ranks is for those to explain
            named = of_node(back) or of_buffers(self.model, self.sick)
            return NaNTrace(origin=named or Origin(), loss=value)
        norms = _norms(grads)
        norm = math.hypot(*norms.values()) if norms else math.nan
        found = of_backward(self.model, back, self.trained, grads)
        if found is None and math.isinf(norm):
            largest = max(norms, key=norms.__getitem__)
            what = "every gradient value is finite, but their norm is not"
            found = of_gradient(self.model, self.trained[largest], what)
        origin = found or of_buffers(self.model, self.sick) or Origin()
        return NaNTrace(origin=origin, loss=value, grad_norm=norm / self.scale)

    def _scheduled(self, watch: ForwardWatch, stages: Stages) -> NaNTrace:
        """Of the stages here; what came bad from another stage is for that one to explain."""
        with watch.watching():
            loss = stages.loss(self.work())
        value = float(loss)  # sync: only in trouble
        received = [s for s in watch.suspects if s.from_data and not s.receiver.startswith(FIRST_STAGE)]
        watch.suspects = [s for s in watch.suspects if s not in received]
        suspect = watch.first()
        if received and suspect is None:
            return NaNTrace(loss=value)
        if suspect is not None or not math.isfinite(value):
            return NaNTrace(origin=of_forward(self.model, watch, self.sick, self.batch, loss=loss), loss=value)
        bad = [p for p in self.trained if p.grad is not None and badness(p.grad)]
        found = of_gradient(self.model, bad[-1], "its gradient is not finite") if bad else None
        return NaNTrace(origin=found or of_buffers(self.model, self.sick) or Origin(), loss=value)

    def _loss(self, made: Any) -> Tensor:
        loss = made if self.loss_of is None else self.loss_of(made)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise MisuseError(f"the closure must return the loss as a tensor of one element, got {_described(loss)}")
        return loss.reshape(())

    def _gradients(self, loss: Tensor, *, through_grad: bool) -> Sequence[Tensor | None]:
        if not loss.requires_grad or not self.trained:
            return [None] * len(self.trained)
        if through_grad:
            return torch.autograd.grad(loss, self.trained, allow_unused=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return [p.grad for p in self.trained]


@contextmanager
def _nothing_changed(model: nn.Module, trained: Sequence[Parameter]) -> Iterator[RngState]:
    parameters = list(dict.fromkeys([*model.parameters(), *trained]))
    rng, host = RngState(device_of(parameters)), HostRandom()
    try:
        with gradients_aside(parameters), Buffers(model).untouched():
            yield rng
    finally:
        rng.restore()
        host.restore()


def _eagerly() -> AbstractContextManager[Any]:
    # why: importing the compiler takes seconds; whoever compiled something has it already
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _norms(grads: Sequence[Tensor | None]) -> dict[int, float]:
    present = {i: g for i, g in enumerate(grads) if g is not None}
    found = measure(list(present.values()), layout_of(list(present.values())))
    return {i: float(norm) for i, norm in zip(present, found, strict=True)}  # sync: only in trouble


def _described(thing: Any) -> str:
    return f"a tensor of shape {list(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__


_NO_FUNCTION = (
    "it cannot be re-run without a function that computes this loss: use guard.step(function), or "
    "watcher.loss(loss, again=function)"
)


@contextmanager
def as_before(buffers: Buffers | None) -> Iterator[None]:
    """Buffers as they were before the forward pass; afterwards as they are now."""
    if buffers is None:
        yield
        return
    with buffers.untouched():
        buffers.put_back(outside=False)
        yield


def second_look(
    model: nn.Module,
    work: "Closure | None",
    batch: Any,
    *,
    rng: RngState | None = None,
    precision: Precision | None = None,
    scale: float = 1.0,
    agree: AgreeOnBad | None = None,
    sharded: bool = False,
    stages: Stages | None = None,
) -> NaNTrace:
    """Run a step again under hooks; whatever the user's code raises becomes part of the answer.

    With `agree` all ranks do so together: see `examine`.
    """
    if work is None:
        origin = of_weights(model, sick_weights(model))
        return NaNTrace(origin=origin or Origin(what=_NO_FUNCTION))

    def run() -> Any:
        with nullcontext() if precision is None else precision.autocast():
            return work() if batch is None else work(batch)

    asked = False

    def all_agree(flag: bool) -> bool:
        nonlocal asked
        asked = True
        return agree is None or agree(flag)

    with random_numbers_kept(device_of(model.parameters())):
        if rng is not None:
            rng.restore()
        try:
            agreeing = None if agree is None else all_agree
            return trace_step(model, run, batch=batch, scale=scale, agree=agreeing, sharded=sharded, stages=stages)
        except Exception as error:
            if agree is not None and not asked:
                agree(False)  # the others wait for an answer
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # as this rank raised it
            return NaNTrace(origin=Origin(what=f"it could not be re-run: {type(cause).__name__}: {cause}"))
