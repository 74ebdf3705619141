"""Several processes, one decision: the numbers of all ranks are added up once per step."""

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steadystep._utils.tensors import is_sharded
from steadystep.errors import UnsupportedError
from steadystep.parallel.messages import Channel, compared, in_lockstep
from steadystep.parallel.payload import PayloadLayout, damaged, decode, encode, mark, same_on_all_ranks
from steadystep.parallel.replicas import (
    Replicas,
    StandIn,
    broadcast,
    copies,
    copies_of_all,
    healthy_rank,
    is_here,
    odd_ones,
    refuse_join,
    reshard,
)
from steadystep.parallel.single_process import AskRank, NamedTensors, RankAction, Sections
from steadystep.parallel.stages import Removable, Stages, by_stage
from steadystep.records import Probe

if TYPE_CHECKING:
    from steadystep.signals.gradients import GradientView


@final
class ProcessGroup:
    """The ranks of a process group."""

    def __init__(self, model: nn.Module, wrapped: DistributedDataParallel | None, group: Any) -> None:
        self._model = model
        self.stages: Stages | None = model if isinstance(model, Stages) else None
        self._wrapped = wrapped
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        reshard(model)
        self.sharded: bool = self.stages is not None or is_sharded(model.parameters())
        self._channel = Channel(model, group)
        self.least, self.texts = self._channel.least, self._channel.texts
        self._questions: list[AskRank] = []
        self._granted: tuple[bool, ...] = ()
        self._after_agreeing: list[RankAction] = []
        self._form: PayloadLayout | None = None
        self._copies: dict[str, float] = {}
        self._every_name: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        """Of a pipeline: parameters and buffers of all stages."""
        self._known: tuple[str, ...] = ()
        self._losses_from = self.size  # ranks that have the loss
        self._own = self._own_parameters()
        self._replicas, self.stand_in = Replicas(model, own=self._own), StandIn(wrapped, self._own)
        self._fitting: Probe | None = None
        """A probe of which all ranks hold one of the same shape; its numbers are added up next time."""
        self.agreements = 0

    def watch(self, named: NamedTensors, buffers: Sequence[str], *, micro_batches: int) -> None:
        """What is counted; the same on all ranks."""
        refuse_join(self._wrapped)
        self._named, self._buffers, self._micro_batches = named, tuple(buffers), micro_batches
        if self.stages is not None:
            self._gather_names()
            self._names_changed = self.on_all(self._gather_names)
            return
        if self._wrapped is not None or self.sharded:  # torch has seen to it
            return
        names = float(zlib.crc32("\n".join(named()[0]).encode()))
        if self.least(names) != -self.least(-names):
            raise UnsupportedError(
                "the ranks hold different parameters. For a pipeline, create its PipelineStage before the guard; for "
                "expert parallelism, make the experts DTensors on their mesh"
            )

    def agree(self, view: "GradientView") -> "GradientView":
        """One all-reduce of a few numbers per parameter and buffer."""
        refuse_join(self._wrapped)
        form = self._up_to_date()
        mine, probe = view.signals, self._fitting
        payload = encode(
            form,
            mine,
            copies=self._copies,
            questions=[any_rank() for any_rank in self._questions],
            checksum=self._replicas.checksum(mine.step) if self.stages is None else 0,
            waiting=mine.probe,
            probe=probe,
        )
        agreed = decode(form, self._channel.summed(payload), mine, probe=probe)
        agreed.check(rank=self.rank, step=mine.step)
        self._granted = agreed.questions
        self.agreements += 1
        for act in self._after_agreeing:
            act()
        self._fitting = mine.probe if agreed.probe_fits else None
        odd, healthy = ((), None) if agreed.same_weights else self._odd_ones()
        signals = replace(agreed.signals, odd_replicas=odd, healthy_rank=healthy) if odd else agreed.signals
        if agreed.damaged:
            state = self._damaged(damaged(mine))
            signals = replace(signals, state=tuple(state), state_peaks=tuple(state.values()))
        return replace(view, signals=signals)

    def any_rank(self, wanted: AskRank) -> AskRank:
        """Granted at the next `agree` after one rank wants it."""
        place = len(self._questions)
        self._questions.append(wanted)
        return lambda: place < len(self._granted) and self._granted[place]

    def on_all(self, act: RankAction, when: AskRank = bool) -> RankAction:
        """A wish, and what follows when it is granted."""
        asked: list[bool] = []
        granted = self.any_rank(lambda: bool(asked) or when())

        def obey() -> None:
            if granted():
                asked.clear()
                act()

        self._after_agreeing.append(obey)
        return lambda: asked.append(True)

    def all(self, flag: bool) -> bool:
        """True when it is true on every rank."""
        return self._channel.summed([float(flag)])[0] == self.size

    def same(self, thing: object) -> bool:
        """One all-reduce of two numbers."""
        total, squares = self._channel.summed(mark(thing))
        return same_on_all_ranks(total, squares, self.size)

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Each averaged over the ranks."""
        return [total / self.size for total in self._channel.summed(numbers)]

    def mean_loss(self, losses: Sequence[float]) -> list[float]:
        """Each averaged over the ranks that have it; what a rank without one holds against it is infinite."""
        return [total / self._losses_from for total in self._channel.summed(losses)]

    def norms(self, names: Sequence[str], norms: Sequence[float]) -> dict[str, float]:
        """By the rule of the gradients: |local part|² ÷ copies, added up."""
        held = dict(zip(names, norms, strict=True)) if norms else {}
        every = self._every_name[0] or tuple(self._copies)
        squares = [held[name] ** 2 / self._copies[name] if name in held else 0.0 for name in every]
        present = [float(name in held) for name in every]
        known, *sums = self._channel.summed([float(bool(held)), *squares, *present])
        if known != self.size:
            return {}
        found = zip(every, sums[: len(every)], sums[len(every) :], strict=True)
        return {name: math.sqrt(square) for name, square, there in found if there}

    def validation(self, loss: float) -> float:
        """The mean over the ranks that have one; NaN stands for having none."""
        known = not math.isnan(loss)
        total, have = self._channel.summed([loss if known else 0.0, float(known)])
        return total / have if have else math.nan

    def compare(self, sections: Sections, *, wrong: str = "") -> str:
        """In one all-gather where nothing differs."""
        return compared(self._channel, sections, wrong=wrong)

    def reshard(self) -> None:
        """FSDP2 keeps whole parameters after a forward pass without a backward pass."""
        if self.sharded:
            reshard(self._model)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is sent by DistributedDataParallel, and FSDP2 lets go of what only a backward pass would free."""
        wrapped = self._wrapped
        if wrapped is None:
            try:
                yield
            finally:
                self.reshard()
            return
        before = wrapped.require_forward_param_sync
        wrapped.require_forward_param_sync = False
        try:
            with wrapped.no_sync():
                yield
        finally:
            wrapped.require_forward_param_sync = before

    def together(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Two all-reduces of one number for each call."""
        if (stages := self.stages) is not None:
            return in_lockstep(
                lambda *batch: stages.loss(work(*batch)), stages.when_entered, self.all, undo=self.reshard
            )
        root = self._wrapped or self._model

        def when_entered(call: Callable[..., None]) -> Removable:
            return root.register_forward_pre_hook(call, prepend=True)  # why first: FSDP2 gathers weights in a hook

        return in_lockstep(work, when_entered, self.all, undo=self.reshard)

    @property
    def adds_up(self) -> bool:
        """DistributedDataParallel does, unless it has fixed its graph after the first pass."""
        return self._wrapped is not None and not self._wrapped.static_graph

    def unreduced(self) -> AbstractContextManager[None]:
        """One all-reduce of the gradients per update instead of one per micro-batch."""
        assert self._wrapped is not None
        unreduced: AbstractContextManager[None] = self._wrapped.no_sync()
        return unreduced

    @torch.no_grad()
    def average_(self, parameters: Sequence[Parameter]) -> None:
        """One by one: this is for the end of an epoch."""
        present = self._channel.summed([float(p.grad is not None) for p in parameters])
        for parameter, count in zip(parameters, present, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(self.size)
                dist.all_reduce(parameter.grad, group=self._group)

    def _up_to_date(self) -> PayloadLayout:
        names, parameters = self._named()
        if (stages := self.stages) is not None:
            if names is not self._known:  # why later: the other stages do not know of it
                self._names_changed()
            if self._form is None:
                self._form = self._layout(*self._every_name, pipelined=True)
            has_loss, stages.lacks_loss = stages.has_loss and not stages.lacks_loss, False
            return self._form if has_loss == self._form.has_loss else replace(self._form, has_loss=has_loss)
        if self._form is None or names is not self._known:
            counts = copies_of_all(parameters, self.size, self._channel.summed, own=self._own)
            self._copies, self._known = dict(zip(names, counts, strict=True)), names
            self._form = self._layout(names, self._buffers)
        return self._form

    def _layout(self, names: tuple[str, ...], buffers: tuple[str, ...], *, pipelined: bool = False) -> PayloadLayout:
        return PayloadLayout(
            rank=self.rank,
            size=self.size,
            names=names,
            buffers=buffers,
            micro_batches=self._micro_batches,
            questions=len(self._questions),
            pipelined=pipelined,
        )

    def _gather_names(self) -> None:
        """The union of the stages; and how many ranks hold each parameter, which are replicas of a stage."""
        assert self.stages is not None
        names, parameters = self._named()
        here = [name for name, parameter in zip(names, parameters, strict=True) if is_here(parameter)]
        said = [json.loads(t) for t in self._channel.documents(json.dumps([here, self._buffers, self.stages.has_loss]))]
        union = by_stage(name for each in said for name in each[0])
        self._every_name = union, by_stage(name for each in said for name in each[1])
        holders = Counter(name for each in said for name in each[0])
        self._losses_from = sum(bool(each[2]) for each in said)
        pairs = zip(names, parameters, strict=True)
        self._copies = {name: copies(p, holders=float(holders[name])) for name, p in pairs if name in holders}
        self._known, self._form = names, None

    def _own_parameters(self) -> frozenset[int]:
        """Parameters that DistributedDataParallel was told to ignore: each rank has others, such as its experts."""
        ignored = getattr(self._wrapped, "parameters_to_ignore", None) or ()
        held = self._model.named_parameters()
        return frozenset(id(p) for n, p in held if (n if "." in n else f".{n}") in ignored)  # as DDP looks them up

    def copy_from(self, rank: int, optimizer: Optimizer) -> None:
        """Give every rank the weights and moments of that one, where they have copies."""
        source = rank if self._group is None else dist.get_global_rank(self._group, rank)

        def send(sent: Tensor) -> None:
            dist.broadcast(sent, source, group=self._group)

        broadcast(self._model, optimizer, send, self._channel.device, own=self._own)

    def _odd_ones(self) -> tuple[tuple[str, ...], int | None]:
        names, mine = self._replicas.each()
        rows = [each.tolist() for each in self._channel.gathered(torch.tensor(mine))]  # sync: only in trouble
        return odd_ones(names, rows), healthy_rank(rows)

    def _damaged(self, mine: dict[str, float]) -> dict[str, float]:
        """The same on every rank: each tensor with the worst that a rank holds, infinity for what is not finite."""
        found: dict[str, float] = {}
        for text in self._channel.documents(json.dumps(mine)):
            for name, peak in json.loads(text).items():
                found[name] = max(found.get(name, 0.0), peak if math.isfinite(peak) else math.inf)
        return found
