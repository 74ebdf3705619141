"""Several processes, one decision: the numbers of all ranks are added up once per step."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadystep.clip.sharded import is_sharded
from steadystep.dist.ballot import Agreed, Form, count, fill
from steadystep.dist.ranks import Named, Wish
from steadystep.dist.replicas import Replicas, odd_ones
from steadystep.dist.shards import counts_here, reshard
from steadystep.errors import MisuseError
from steadystep.look import Look
from steadystep.records import Probe

_TEXT = 1024  # bytes


@final
class Together:
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
        self._wishes: list[Wish] = []
        self._granted: tuple[bool, ...] = ()
        self._form: Form | None = None
        self._shares: dict[str, bool] = {}
        self._replicas = Replicas(model)
        self._fitting: Probe | None = None
        """A probe of which all ranks hold one of the same shape; its numbers are added up next time."""
        self.agreements = 0

    def watch(self, named: Named, buffers: Sequence[str], *, micro_batches: int) -> None:
        """What is counted; the same on all ranks."""
        self._named, self._buffers, self._micro_batches = named, tuple(buffers), micro_batches

    def agree(self, look: Look) -> Look:
        """One all-reduce of a few numbers per parameter and buffer."""
        form = self._up_to_date()
        mine, probe = look.signals, self._fitting
        ballot = fill(
            form,
            mine,
            shares=self._shares,
            wishes=[wish() for wish in self._wishes],
            checksum=self._replicas.checksum(mine.step),
            waiting=mine.probe,
            probe=probe,
        )
        agreed = count(form, self._summed(ballot), mine, probe=probe)
        self._check(agreed, mine.step)
        self._granted = agreed.wishes
        self.agreements += 1
        self._fitting = mine.probe if agreed.probe_fits else None
        odd = () if agreed.same_weights else self._odd_ones()
        look.signals = replace(agreed.signals, odd_replicas=odd) if odd else agreed.signals
        return look

    def wish(self, wanted: Wish) -> Wish:
        """Granted at the next `agree` after one rank wants it."""
        place = len(self._wishes)
        self._wishes.append(wanted)
        return lambda: place < len(self._granted) and self._granted[place]

    def all(self, flag: bool) -> bool:
        """True when it is true on every rank."""
        return self._summed([float(flag)])[0] == self.size

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Each averaged over the ranks."""
        return [total / self.size for total in self._summed(numbers)]

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

    def rest(self) -> None:
        """FSDP2 keeps whole parameters after a forward pass without a backward pass."""
        if self.sharded:
            reshard(self._model)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is sent by DistributedDataParallel, and FSDP2 lets go of what only a backward pass would free."""
        wrapped = self._wrapped
        if wrapped is None:
            try:
                yield
            finally:
                self.rest()
            return
        before = wrapped.require_forward_param_sync
        wrapped.require_forward_param_sync = False
        try:
            with wrapped.no_sync():
                yield
        finally:
            wrapped.require_forward_param_sync = before

    def _up_to_date(self) -> Form:
        names, parameters = self._named()
        if self._form is None or names is not self._form.names:
            self._shares = {
                name: counts_here(name, parameter, rank=self.rank, size=self.size)
                for name, parameter in zip(names, parameters, strict=True)
            }
            self._form = Form(
                rank=self.rank,
                size=self.size,
                names=names,
                buffers=self._buffers,
                micro_batches=self._micro_batches,
                wishes=len(self._wishes),
            )
        return self._form

    def _odd_ones(self) -> tuple[str, ...]:
        names, mine = self._replicas.each()
        checksums = torch.tensor(mine, device=self._device)
        every = [torch.empty_like(checksums) for _ in range(self.size)]
        dist.all_gather(every, checksums, group=self._group)
        return odd_ones(names, [each.tolist() for each in every])  # sync: only in trouble

    def _summed(self, numbers: Sequence[float]) -> list[float]:
        ballot = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(ballot, group=self._group)
        sums: list[float] = ballot.tolist()  # sync: on an accelerator once more per step
        return sums

    def _check(self, agreed: Agreed, step: int) -> None:
        if not agreed.in_step:
            raise MisuseError(
                f"the ranks are out of step: rank {self.rank} is at step {step} and another is not, or was given "
                "another number of micro-batches. Every rank must call step() equally often, also after an exception"
            )
        if not agreed.same_settings:
            raise MisuseError(
                "learning rates or loss scales differ between ranks, so their weights would drift apart: set them "
                "alike on every rank"
            )


def _device_for(model: nn.Module, group: Any) -> torch.device:
    """Host memory where the group can send it: then agreeing does not wait for the accelerator."""
    if "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    first: Tensor | None = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device
