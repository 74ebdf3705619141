"""What the model returns, seen through a forward hook on sampled steps, and what common losses would make of it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.text import plain_name
from steadystep._utils.tree import tensors_in
from steadystep.records import OutputStats
from steadystep.signals.activations import ForwardHooks, SilentHook, compiles, numbers_may_leave, open_modules
from steadystep.signals.batch_stats import BatchStatistics, PartStats, batch_tensors
from steadystep.signals.batches import (
    MOST,
    UNKNOWN,
    Inputs,
    faintest,
    is_batch_first,
    main_tensor,
    size_of_inputs,
    spread_of,
    values_of,
)
from steadystep.signals.gradients import Gradients
from steadystep.signals.loss_calls import LossCall, LossRecorder
from steadystep.signals.losses import KINDS, OF, Copies, has_known_level, losses_of, mistakes, without_ignored
from steadystep.signals.structure import around_graph, has_frozen_statistics

TARGET = "['target']"
"""The name of what the loss function was called with, beside the tensors of the batch."""
_PROBES = 6  # batches that make a record where only those of probes are known
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_TIME_FIRST = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@final
class Outputs(ForwardHooks):
    """Hooks for one forward pass; the first output of the model counts.

    A hook can never break the forward pass: a model whose output cannot be measured is left alone from then on.
    """

    def __init__(self, model: nn.Module, gradients: Gradients) -> None:
        super().__init__(model)
        self._gradients = gradients
        self._batch: list[tuple[str, Tensor]] = []
        self._step, self._closed, self._first = 0, False, False
        self._around: dict[str, Any] | None = None
        self._ordered: list[tuple[str, tuple[int, ...]]] = []
        self._misread: list[str] = []
        self._listening = ExitStack()
        self._shape: tuple[int, ...] = ()
        self._evaluating = (False, False)
        self._child: Any = None
        self._kept: tuple[list[Any], Any] | None = None
        self._recorder: LossRecorder | None = None
        self._target: PartStats | None = None
        self._copies, self._count = Copies(), 0
        self._called: dict[str, Any] = {}
        self.heard: Callable[[Any, int, Mapping[str, PartStats]], None] = lambda batch, step, measured: None
        """Told of inputs and targets where the loop gives no batch, with what has measured the target."""
        self.seen: Callable[[], None] = lambda: None
        """Told when a forward pass has been measured."""
        self._names: tuple[str, ...] = ()
        self.waiting: list[Tensor] = []
        """One flat tensor for the next host read."""

    @contextmanager
    def seeing(self, batch: Any, step: int) -> Iterator[None]:
        """Around the forward pass of `step` on `batch`."""
        self.begin(batch, step, first=False)
        try:
            yield
            self.conclude()
        finally:
            self.drop()

    def begin(self, batch: Any, step: int, *, first: bool = True) -> None:
        """Listen from here on, until `quiet`; `first`: to the first pass of the step, where it has several."""
        self._first = first
        self._batch, self._step = ([] if batch is None else batch_tensors(batch)), step
        self.start()
        # why not where something is compiled: a mode on the stack would be traced, or cause another compilation
        self._recorder = None if self._closed or compiles() else LossRecorder(tensor for _, tensor in self._batch)
        self._listening.enter_context(self._recorder or nullcontext())

    def quiet(self) -> None:
        """Backward begins: what was heard is kept for `conclude`."""
        self._listening.close()
        self.stop()

    def conclude(self, batch: Any = None) -> None:
        """Measure what was heard; of `batch`, where it is known only now."""
        self.quiet()
        if batch is not None and not self._batch:
            self._batch = batch_tensors(batch)
        given, output = self._kept or ([], self._child)
        if output is not None:
            self._called = {}
            with suppress(Exception):  # why all: it must not cost the step
                self._hear(given)
            self._see(self._model, given, output)
        self.seen()

    def drop(self) -> None:
        """Forget what was heard and not measured."""
        self.quiet()
        self._batch, self._child, self._kept, self._recorder = [], None, None, None

    def _hear(self, given: list[Any]) -> None:
        """The loss functions that were called, and the target of the first."""
        if (heard := self._recorder) is None:
            return
        call = next((call for call in heard.calls if call.target is not None), None)
        first = next((tensor.detach() for _, tensor in tensors_in(given) if tensor.dim()), None)
        size = len(self._batch[0][1]) if self._batch else 0 if first is None else len(first)
        wrong = dict.fromkeys(mistakes(heard.calls, heard.differences, heard.softmaxes, size))
        self._called = {"mistakes": tuple(wrong), "cuts": tuple(heard.cuts[:3]), "terms": len(heard.calls)}
        self._called |= {"unlinked": self._held_of(heard), "ahead": heard.ahead, "penalized": heard.penalized}
        self._called["policy"] = heard.picks and not heard.calls
        if call is None or call.target is None or not call.target.dim() or call.target.is_complex():
            return
        self._count_target(call)
        target = call.target
        if first is not None and first.data_ptr() == target.data_ptr() and first.numel() == target.numel():
            self._called["ahead"] = "the target is the input itself"
        if first is not None and len(heard.calls) == 1:
            self._copies.add(first, target)
        if not self._batch:
            measured = {TARGET: self._target} if self._target is not None and without_ignored(call) is target else {}
            batch = {"target": target} if first is None else {"input": first, "target": target}
            self.heard(batch, self._step, measured)
            self._batch = [] if first is None else [("['input']", first)]
        if not any(tensor.data_ptr() == target.data_ptr() for _, tensor in self._batch):
            self._batch.append((TARGET, target))

    def _count_target(self, call: LossCall) -> None:
        """What the loss compares with, over all probes."""
        target = without_ignored(call)
        known = self._target
        if known is None or (known.shape != tuple(target.shape[1:]) and not known.flat):
            self._target = known = PartStats(TARGET, target, flat=known is not None)
        known.add(target)
        kind = "" if call.weighted or not has_known_level(call) else KINDS.get(call.name, "")
        made = call.origin
        if made is not None and made.before is not None and "log" in made.name:  # what the scores come from
            made = made.before
        self._called |= {"kind": kind, "result": call.result, "activation": "" if made is None else made.name}

    def _held_of(self, heard: LossRecorder) -> tuple[str, ...]:
        """Names of the parameters that an optimizer holds and that were computed with under `no_grad` only."""
        blind = {id(p) for p in heard.unlinked} & {id(p) for p in self._gradients.parameters}
        return tuple(plain_name(n) for n, p in self._model.named_parameters() if id(p) in blind) if blind else ()

    def start(self) -> None:
        """Put the hooks in place; what was seen before is forgotten."""
        self.clear()
        if not (modules := [] if self._closed else open_modules(self._model)):
            return
        self._handles.append(self._model.register_forward_hook(SilentHook(self._look), with_kwargs=True))
        # why only in training: hooks would take torch's fast path from attention
        open_ones = [child for child in self._model.children() if child.training or not isinstance(child, _ATTENTION)]
        self._handles += [child.register_forward_hook(SilentHook(self._keep)) for child in open_ones]
        for name, module in modules:
            attention = getattr(module, "self_attn", module)
            if isinstance(module, _TIME_FIRST) and module.training and not getattr(attention, "batch_first", True):
                self._handles.append(module.register_forward_pre_hook(SilentHook(self._order(name))))

    def clear(self) -> None:
        """Take the hooks away and forget what they saw."""
        self.stop()
        self.waiting, self._ordered, self._child, self._kept, self._count = [], [], None, None, 0

    def _order(self, name: str) -> Callable[[nn.Module, Any], None]:
        def look(_: nn.Module, args: Any) -> None:
            given = args[0] if args else None
            if isinstance(given, Tensor) and given.dim() == 3:
                self._ordered.append((name, tuple(given.shape)))

        return look

    def _keep(self, _: nn.Module, __: Any, output: Any) -> None:
        """For a loop that never calls the model itself: the last of its children counts."""
        if not self.waiting and numbers_may_leave():
            self._child = output

    def _look(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._count += 1
        if self.waiting or self._kept is not None or not numbers_may_leave():
            return
        self._kept = [*args, *kwargs.values()], output  # until its target is known

    def _see(self, module: nn.Module, given: list[Any], output: Any) -> None:
        try:
            if (found := main_tensor(output)) is not None:
                self._measure(module, given, found, output)
        except Exception:  # why all: it must not cost the step
            self._closed, self.waiting = True, []

    def _measure(self, module: nn.Module, given: list[Any], output: Tensor, everything: Any) -> None:
        if self._around is None:
            heard, inputs = self._recorder, [tensor for _, tensor in tensors_in(given)]
            self._around = around_graph(output, module, self._gradients.parameters, inputs, heard)
        with torch.no_grad():
            first, whole = next((t for _, t in tensors_in(given) if t.dim()), None), output.detach()
            part = whole if whole.numel() <= MOST else whole[: max(1, MOST // max(1, whole[0].numel()))]
            losses = losses_of(part, self._batch) if part is whole else {}
            result, kind = self._called.pop("result", None), self._called.get("kind", "")
            if result is not None and kind:
                losses[f"{kind}{OF}{TARGET}"] = result
            numbers = [*values_of(part.float()), spread_of(None if first is None else first.detach())]
            sharp = [] if self._recorder is None else self._recorder.sharpness
            sharpest = torch.stack(sharp).amax() if sharp else UNKNOWN
            numbers += [faintest(everything, output), sharpest, size_of_inputs(given)]
            home = part.device
            flat = [number.detach().float().reshape(()).to(home) for number in (*numbers, *losses.values())]
            target = [] if self._target is None else [self._target.pending().float().to(home)]
            self.waiting = [torch.cat([torch.stack(flat), self._copies.pending(home), *target])]
        self._misread = [name for name, shape in self._ordered if is_batch_first(shape, self._batch)]
        self._names, self._shape, evaluates = tuple(losses), tuple(output.shape), not module.training
        self._evaluating = evaluates, evaluates or has_frozen_statistics(module)

    def read(self, values: Sequence[float]) -> OutputStats:
        """The record, from the numbers that were waiting."""
        self.waiting = []
        low, high, rms, spread, row, column, entropy, alignment, distinct, given, faint, sharp, fed, *rest = values
        losses, host = rest[: len(self._names)], iter(rest[len(self._names) :])
        copied = self._copies.read(next(host), next(host))
        return OutputStats(
            step=self._step,
            first=self._first,
            shape=self._shape,
            smallest=low,
            largest=high,
            rms=rms,
            spread=spread,
            input_spread=given,
            input_rms=math.sqrt(fed) if fed >= 0.0 else math.nan,
            row_error=row,
            column_error=column,
            entropy=entropy,
            alignment=alignment,
            distinct=distinct,
            faintest=faint,
            sharpest=sharp,
            calls=max(1, self._count),
            losses=tuple(zip(self._names, losses, strict=True)),
            evaluating=self._evaluating[1],
            evaluating_all=self._evaluating[0],
            misread=tuple(self._misread),
            **(self._around or {}),
            copied=copied,
            target=None if self._target is None else self._target.read(host),
            **self._called,
        )


@final
class Evidence:
    """Batches and outputs, for the host read of a step."""

    def __init__(self, outputs: Outputs | None = None, inputs: Inputs | None = None) -> None:
        self._batches, self._inputs = BatchStatistics(), inputs
        self._outputs = outputs
        self.waiting: list[Tensor] = []
        """Flat tensors for the next host read, in the order `read` wants them."""
        if outputs is not None:
            outputs.heard = self._hear
            outputs.seen = self._gather

    def _hear(self, batch: dict[str, Tensor], step: int, measured: Mapping[str, PartStats]) -> None:
        """Of a loop that gives no batch."""
        self._batches.add(batch, step, enough=_PROBES, measured=measured)
        if self._inputs is not None:
            self._inputs.add(batch.get("input"))

    def add(self, batch: Any, step: int) -> None:
        """The batch of a step."""
        self._batches.add(batch, step)
        self._gather()

    def _gather(self) -> None:
        seen = [] if self._outputs is None else self._outputs.waiting
        self.waiting = [*seen, *self._batches.waiting]

    def read(self, values: Sequence[float]) -> dict[str, Any]:
        """Fields of `Signals`, from the numbers that were waiting."""
        found: dict[str, Any] = {}
        if (seen := self._outputs) is not None and seen.waiting:
            end = seen.waiting[0].numel()
            found["outputs"], values = seen.read(values[:end]), values[end:]
        if self._batches.waiting:
            found["batch"] = self._batches.read(values)
        self.waiting = []
        return found
