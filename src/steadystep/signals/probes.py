"""What one update did to the weights, and how it surprised Adam; looked at every so many steps."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steadystep.records import Probe
from steadystep.signals.activations import Activations, compiles, numbers_may_leave
from steadystep.signals.attention_logits import AttentionLogits
from steadystep.signals.gradients import Gradients
from steadystep.signals.outputs import Outputs
from steadystep.signals.samples import Lot, Moments, is_plain
from steadystep.signals.weights import RowNorms


@final
class UpdateProbes:
    """Looks at samples of weights, gradients and second moments around one update.

    At a due step: `before`, the update, `after`; or `cancel` when it is refused. What is `waiting` then rides
    along with the host read of the next look, and `read` makes the record. Parameters without a gradient are left out;
    what is not known of one (no second moment, a sparse gradient) is NaN.
    """

    def __init__(
        self,
        gradients: Gradients,
        optimizer: Optimizer,
        *,
        activations: Activations | None = None,
        attention: AttentionLogits | None = None,
        tables: RowNorms | None = None,
        outputs: Outputs | None = None,
        every: int = 128,
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._activations = activations
        self._attention = attention
        self._tables = tables
        self._outputs = outputs
        self._watchers = [watcher for watcher in (activations, attention) if watcher is not None]
        self.every = every
        """Steps; from there on nothing is due at any other step than its multiples."""
        self._names: tuple[str, ...] = ()
        self._params: tuple[Parameter, ...] = ()
        self._lots: list[Lot] = []
        self._modules: tuple[str, ...] = ()
        self._attentions: tuple[str, ...] = ()
        self._table_names: tuple[str, ...] = ()
        self._open = False
        self._step = 0
        self.waiting: list[Tensor] = []
        """Flat tensors for the next host read, in the order `read` wants them."""
        self.listens = True
        """Passes that the loop makes by itself are watched too."""
        self._awaited: RemovableHandle | None = None
        self._listening: Outputs | None = None
        """What hears, or has heard, a pass that the loop makes by itself."""
        self.record: Probe | None = None
        """One that was read already, when the state was saved."""

    def due(self, step: int) -> bool:
        """True at 1, 2, 4, 8, … and from `every` on at its multiples."""
        return step.bit_count() == 1 if step < self.every else step % self.every == 0

    def before(self) -> None:
        """Just before the update, with its gradients in place: remember samples of the weights."""
        try:
            self._remember()
        except RuntimeError:  # why: a tensor that cannot be sampled costs the probe, never the step
            self.cancel()

    def after(self, step: int) -> None:
        """Just after the update of `step`, with its gradients still in place: compare."""
        if not self._open:
            return
        try:
            self._compare(step)
        except RuntimeError:  # why: as in `before`
            self.cancel()

    def cancel(self) -> None:
        """Forget what is open or pending: the update was refused, or undone."""
        for lot in self._lots:
            lot.forget()
        self._open, self.waiting, self.record = False, [], None
        for watcher in self._watchers:
            watcher.clear()

    def read(self, values: Sequence[float]) -> Probe | None:
        """The record, once; None when nothing was pending. `values`: the numbers of `waiting`, one after the other."""
        record = self._make(values) if self.waiting else self.record
        if record is not None:
            self.waiting, self.record = [], None
        return record

    @torch.no_grad()
    def _remember(self) -> None:
        names, _, _ = self._gradients.collect()
        if names != self._names or self._gradients.parameters is not self._params:
            self._lots = []  # so that a failure below is not taken for a plan
            self._names, self._params = names, self._gradients.parameters
            self._lots = self._plan()
        for lot in self._lots:
            lot.remember()
        self._open = bool(self._lots)

    @torch.no_grad()
    def _compare(self, step: int) -> None:
        self.waiting = [lot.measure() for lot in self._lots]
        self._open, self._step = False, step
        if self._tables is not None:
            self.waiting += self._tables.measure()
            self._table_names = self._tables.names
        if self._attention is not None:
            self._attentions = self._attention.modules
            self.waiting += self._attention.pending()
        if self._activations is not None:
            self._modules = self._activations.modules
            self.waiting += self._activations.pending()
        for watcher in self._watchers:
            watcher.clear()  # its hooks may be at work again before these numbers are read

    def expect(self, step: int) -> None:
        """Watch the next forward pass, which the loop makes by itself, if `step` is due."""
        self.drop_pass()
        outputs = self._outputs
        if outputs is not None and self.listens and self.due(step) and not compiles():
            self._awaited = outputs.before_pass(partial(self._begin, outputs, step))

    def _begin(self, outputs: Outputs, step: int, *_: Any) -> None:
        if self._awaited is None or not torch.is_grad_enabled() or not numbers_may_leave():
            return
        self._awaited.remove()
        self._awaited, self._listening = None, outputs
        for watcher in self._watchers:
            watcher.start()
        outputs.begin(None, step)

    def quiet(self) -> None:
        """Backward begins."""
        if self._listening is not None:
            self._listening.quiet()
            for watcher in self._watchers:
                watcher.stop()

    def conclude(self, batch: Any = None) -> None:
        """The pass that was watched has led to the gradients of this model."""
        if self._listening is not None:
            self.quiet()
            self._listening.conclude(batch)
            self._listening.drop()
            self._listening = None

    def drop_pass(self) -> None:
        """It was another network's, or there was none."""
        if self._awaited is not None:
            self._awaited.remove()
            self._awaited = None
        if self._listening is not None:
            self._listening.drop()
            self._listening = None
            for watcher in self._watchers:
                watcher.clear()

    @contextmanager
    def watching(self, batch: Any = None, step: int = 0) -> Iterator[None]:
        """Around the forward pass of a step that is due: hooks on activations, attention and the output."""
        if self._listening is not None:  # the loop has made it by itself
            self.conclude(batch)
            yield
            return
        self.drop_pass()
        with ExitStack() as stack:
            if self._outputs is not None:
                stack.enter_context(self._outputs.seeing(batch, step))
            for watcher in self._watchers:
                stack.enter_context(watcher.watching())
            yield

    def _plan(self) -> list[Lot]:
        params = [p for p in self._params if p.grad is not None]
        by_device: dict[torch.device, tuple[list[str], list[Parameter]]] = {}
        for name, p in zip(self._names, params, strict=True):
            if is_plain(p) and p.numel():
                names, members = by_device.setdefault(p.device, ([], []))
                names.append(name)
                members.append(p)
        return [Lot(names, held, Moments(self._optimizer, held)) for names, held in by_device.values()]

    def _make(self, values: Sequence[float]) -> Probe:
        host = iter(values)
        parts = [lot.read(host) for lot in self._lots]
        weights, updates, moments, surprises, zeros = (
            tuple(value for part in parts for value in part[column]) for column in range(5)
        )
        row_norms = tuple(islice(host, len(self._table_names)))
        bounds = tuple(islice(host, len(self._attentions)))
        dead, saturated = Activations.read(tuple(host))
        return Probe(
            step=self._step,
            names=tuple(name for lot in self._lots for name in lot.names),
            weight_rms=weights,
            update_rms=updates,
            second_moments=_unless_unknown(moments),
            surprises=_unless_unknown(surprises),
            zero_shares=zeros,
            modules=self._modules,
            dead=dead,
            saturated=saturated,
            tables=self._table_names,
            row_norms=row_norms,
            attentions=self._attentions,
            logit_bounds=bounds,
        )

    def state_dict(self) -> dict[str, Any]:
        """What waits to be read, ready for JSON."""
        if self.waiting:
            home = self.waiting[0].device
            values = torch.cat([tensor.to(home) for tensor in self.waiting]).tolist()  # sync: only when saved
            self.waiting, self.record = [], self._make(values)
        return {"record": None if self.record is None else self.record.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.cancel()
        self.record = None if state["record"] is None else Probe.from_json(state["record"])


def _unless_unknown(values: tuple[float, ...]) -> tuple[float, ...]:
    return () if all(math.isnan(value) for value in values) else values
