"""Several processes, one decision: the numbers of all ranks are added up once per step."""

import json
import math
import zlib
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

from steadystep._utils.tensors import device_of, is_sharded
from steadystep.errors import UnsupportedError
from steadystep.parallel.lockstep import in_lockstep
from steadystep.parallel.payload import PayloadLayout, damaged, decode, encode, mark, same_on_all_ranks
from steadystep.parallel.replicas import Replicas, broadcast, copies_of_all, healthy_rank, odd_ones, reshard
from steadystep.parallel.single_process import (
    SECTIONS,
    AskRank,
    NamedTensors,
    RankAction,
    Sections,
    checksum,
    difference,
)
from steadystep.records import Probe

if TYPE_CHECKING:
    from steadystep.signals.gradients import GradientView

_TEXT = 1024  # bytes


@final
class ProcessGroup:
    """The ranks of a process group."""

    def __init__(self, model: nn.Module, wrapped: DistributedDataParallel | None, group: Any) -> None:
        self._model = model
        self._wrapped = wrapped
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        reshard(model)
        self.sharded: bool = is_sharded(model.parameters())
        self._device = _device_for(model, group)
        self._questions: list[AskRank] = []
        self._granted: tuple[bool, ...] = ()
        self._after_agreeing: list[RankAction] = []
        self._form: PayloadLayout | None = None
        self._copies: dict[str, float] = {}
        self._replicas = Replicas(model)
        self._fitting: Probe | None = None
        """A probe of which all ranks hold one of the same shape; its numbers are added up next time."""
        self.agreements = 0

    def watch(self, named: NamedTensors, buffers: Sequence[str], *, micro_batches: int) -> None:
        """What is counted; the same on all ranks."""
        self._refuse_join()
        self._named, self._buffers, self._micro_batches = named, tuple(buffers), micro_batches
        if self._wrapped is not None or self.sharded:  # torch has seen to it
            return
        names = float(zlib.crc32("\n".join(named()[0]).encode()))
        if self.least(names) != -self.least(-names):
            raise UnsupportedError(
                "the ranks hold different parameters, as in pipeline or expert parallelism, which is not "
                "supported: use DistributedDataParallel or fully_shard (FSDP2)"
            )

    def agree(self, view: "GradientView") -> "GradientView":
        """One all-reduce of a few numbers per parameter and buffer."""
        self._refuse_join()
        form = self._up_to_date()
        mine, probe = view.signals, self._fitting
        payload = encode(
            form,
            mine,
            copies=self._copies,
            questions=[any_rank() for any_rank in self._questions],
            checksum=self._replicas.checksum(mine.step),
            waiting=mine.probe,
            probe=probe,
        )
        agreed = decode(form, self._summed(payload), mine, probe=probe)
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

    def on_all(self, act: RankAction) -> RankAction:
        """A wish, and what follows when it is granted."""
        asked: list[bool] = []
        granted = self.any_rank(lambda: bool(asked))

        def obey() -> None:
            if granted():
                asked.clear()
                act()

        self._after_agreeing.append(obey)
        return lambda: asked.append(True)

    def all(self, flag: bool) -> bool:
        """True when it is true on every rank."""
        return self._summed([float(flag)])[0] == self.size

    def same(self, thing: object) -> bool:
        """One all-reduce of two numbers."""
        total, squares = self._summed(mark(thing))
        return same_on_all_ranks(total, squares, self.size)

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Each averaged over the ranks."""
        return [total / self.size for total in self._summed(numbers)]

    def norms(self, names: Sequence[str], norms: Sequence[float]) -> list[float]:
        """By the rule of the gradients: |local part|² ÷ copies, added up."""
        held = dict(zip(names, norms, strict=True)) if norms else {}
        squares = [held.get(name, 0.0) ** 2 / count for name, count in self._copies.items()]
        known, *sums = self._summed([float(bool(held)), *squares])
        whole = dict(zip(self._copies, sums, strict=True))
        return [math.sqrt(whole[name]) for name in names] if known == self.size else []

    def least(self, number: float) -> float:
        """The smallest of all ranks."""
        value = torch.tensor([number], dtype=torch.float64, device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return float(value)  # sync: now and then

    def validation(self, loss: float) -> float:
        """The mean over the ranks that have one; NaN stands for having none."""
        known = not math.isnan(loss)
        total, have = self._summed([loss if known else 0.0, float(known)])
        return total / have if have else math.nan

    def texts(self, text: str) -> list[str]:
        """What every rank says. As bytes and not as objects: nothing is unpickled."""
        raw = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self._device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self._group)
        said = [bytes(each.tolist()) for each in every]  # sync: only in trouble
        return [each.rstrip(b"\0").decode(errors="ignore") for each in said]

    def compare(self, sections: Sections, *, wrong: str = "") -> str:
        """Checksums first; what differs is sent only then. A rank with a mistake has nothing to compare."""
        mine = [float(bool(wrong)), *(float(checksum(sections.get(name, {}))) for name in SECTIONS)]
        every = self._gathered(torch.tensor(mine, dtype=torch.float64))
        if any(bool(row[0]) for row in every):
            said = [(rank, text) for rank, text in enumerate(self.texts(wrong)) if text]
            return "; ".join(dict.fromkeys(f"rank {rank} cannot create its guard: {text}" for rank, text in said[:2]))
        odd = [name for place, name in enumerate(SECTIONS, start=1) if len({float(row[place]) for row in every}) > 1]
        if not odd:
            return ""
        found = [self._documents(json.dumps(sections[name])) for name in odd]
        told = [difference(name, [json.loads(text) for text in texts]) for name, texts in zip(odd, found, strict=True)]
        return f"the ranks differ. {'. '.join(told)}. Use the same settings, model and optimizer on every rank"

    def _documents(self, text: str) -> list[str]:
        """Texts of any length."""
        raw = zlib.compress(text.encode())
        sizes = [int(size) for size in self._gathered(torch.tensor([float(len(raw))], dtype=torch.float64))]
        mine = torch.frombuffer(bytearray(raw.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        said = [bytes(each.tolist()) for each in self._gathered(mine)]  # sync: only in trouble
        return [zlib.decompress(each[:size]).decode() for each, size in zip(said, sizes, strict=True)]

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        sent = mine.to(self._device)
        every = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(every, sent, group=self._group)
        return [each.cpu() for each in every]  # sync: when a guard is made

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
        return in_lockstep(work, self._wrapped or self._model, self.all, undo=self.reshard)

    def _refuse_join(self) -> None:
        """A rank that has run out of batches answers DDP's messages there, and would not answer ours."""
        config = getattr(self._wrapped, "_join_config", None)
        if config is not None and config.enable:
            raise UnsupportedError(
                "DistributedDataParallel.join() lets ranks continue after others ran out of batches, and then they "
                "cannot agree: remove join() and use guard.batches(loader), which ends on all ranks with the "
                "shortest, or drop_last"
            )

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
        present = self._summed([float(p.grad is not None) for p in parameters])
        for parameter, count in zip(parameters, present, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(self.size)
                dist.all_reduce(parameter.grad, group=self._group)

    def _up_to_date(self) -> PayloadLayout:
        names, parameters = self._named()
        if self._form is None or names is not self._form.names:
            self._copies = dict(zip(names, copies_of_all(parameters, self.size, self._summed), strict=True))
            self._form = PayloadLayout(
                rank=self.rank,
                size=self.size,
                names=names,
                buffers=self._buffers,
                micro_batches=self._micro_batches,
                questions=len(self._questions),
            )
        return self._form

    def copy_from(self, rank: int, optimizer: Optimizer) -> None:
        """Give every rank the weights and moments of that one, where they have copies."""
        source = rank if self._group is None else dist.get_global_rank(self._group, rank)
        broadcast(self._model, optimizer, lambda sent: dist.broadcast(sent, source, group=self._group), self._device)

    def _odd_ones(self) -> tuple[tuple[str, ...], int | None]:
        names, mine = self._replicas.each()
        checksums = torch.tensor(mine, device=self._device)
        every = [torch.empty_like(checksums) for _ in range(self.size)]
        dist.all_gather(every, checksums, group=self._group)
        rows = [each.tolist() for each in every]  # sync: only in trouble
        return odd_ones(names, rows), healthy_rank(rows)

    def _damaged(self, mine: dict[str, float]) -> dict[str, float]:
        """The same on every rank: each tensor with the worst that a rank holds, infinity for what is not finite."""
        found: dict[str, float] = {}
        for text in self._documents(json.dumps(mine)):
            for name, peak in json.loads(text).items():
                found[name] = max(found.get(name, 0.0), peak if math.isfinite(peak) else math.inf)
        return found

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        payload = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(payload, group=self._group)
        sums: list[float] = payload.tolist()  # sync: on an accelerator once more per step
        return sums


def _device_for(model: nn.Module, group: Any) -> torch.device:
    """Host memory where the group can send it: then agreeing does not wait for the accelerator."""
    if "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return device_of(model.parameters())
