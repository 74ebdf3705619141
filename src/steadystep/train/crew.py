"""`distributed: ddp | fsdp` under torchrun: the ranks of one run, and what each of them trains on."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, final

import torch
from torch import nn

from steadystep.dist.through import Through
from steadystep.errors import ConfigError, SteadystepError
from steadystep.train.job import Job, make
from steadystep.train.plan import RunSettings
from steadystep.train.split import split

Kind = Literal["ddp", "fsdp"]

_APART = 1_000_003  # between the seeds of two ranks
_ON_POLICY = ("policy", "grpo")
_TIMEOUT = timedelta(minutes=10)


@final
class Crew:
    """All processes that torchrun started for this run; one is a crew too."""

    def __init__(self, kind: Kind | None = None, *, rank: int = 0, size: int = 1) -> None:
        self.kind, self.rank, self.size = kind, rank, size

    @classmethod
    def join(cls, kind: Kind | None) -> "Crew":
        """Meet the others. Without torchrun there are none."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if kind is None:
            raise ConfigError(f"torchrun started {size} processes: say distributed: ddp, or fsdp, in the file")
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        torch.distributed.init_process_group(
            backend, store=_store(), rank=int(os.environ["RANK"]), world_size=size, timeout=_TIMEOUT
        )
        return cls(kind, rank=torch.distributed.get_rank(), size=size)

    @property
    def restarted(self) -> bool:
        """Torchrun has started it once more, after a rank died."""
        return _life() > 0

    def first(self, work: Callable[[], None]) -> None:
        """Have rank 0 do it while the others wait; its mistake ends them all and is told once."""
        failure: SteadystepError | None = None
        if self.rank == 0:
            try:
                work()
            except SteadystepError as error:
                failure = error
        if self.size > 1:
            failed = torch.tensor([float(failure is not None)])
            torch.distributed.broadcast(failed, src=0)
            if self.rank > 0 and bool(failed):  # sync: once, at the start
                raise SystemExit(2)
        if failure is not None:
            raise failure

    def faults(self, declared: tuple[dict[str, Any], ...]) -> tuple[tuple[dict[str, Any], ...], ...]:
        """Those of all ranks, and those of this one: `rank: 1` puts a fault on one rank, without it all have it."""
        mine = [fault for fault in declared if fault.get("rank", self.rank) == self.rank]
        every, own = (
            tuple({key: value for key, value in fault.items() if key != "rank"} for fault in some)
            for some in (declared, mine)
        )
        return every, own

    def spread(self, job: Job, settings: RunSettings) -> None:
        """Other batches for every rank, and one model for all."""
        if self.size == 1:
            return
        if settings.task in _ON_POLICY:
            raise ConfigError(f"task {settings.task!r} draws its batches from the model itself: run it in one process")
        seed = settings.seed + _APART * self.rank
        others = make(settings.task, seed) if self.rank and job.draws else job
        job.batches = others.batches if job.draws else split(job.batches, self.rank, self.size, seed=settings.seed)
        torch.manual_seed(seed)
        if self.kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(Through(job.model, job.loss))
            job.model, job.loss = wrapped, wrapped
        else:
            _shard(job)

    def leave(self) -> None:
        """The run is over."""
        if self.size > 1:
            torch.distributed.destroy_process_group()


def _life() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _store() -> Any:
    """Where the ranks find each other, new in every life.

    why: torchrun keeps its store over a restart, with the addresses of processes that have died.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    stores: Any = torch.distributed  # its stubs do not know them
    store = stores.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=not agent and os.environ["RANK"] == "0",
        timeout=_TIMEOUT,
    )
    return stores.PrefixStore(f"steadystep/{_life()}", store)


def _shard(job: Job) -> None:
    """FSDP2: each block of a stack by itself, then what is left."""
    from torch.distributed.fsdp import fully_shard

    held = {id(p): name for name, p in job.model.named_parameters()}
    stacks = [m for m in job.model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and m is not job.model]
    for block in [block for stack in stacks for block in stack if any(True for _ in block.parameters())]:
        if not isinstance(block, nn.ModuleList | nn.Sequential):
            fully_shard(block)
    fully_shard(job.model)
    now = dict(job.model.named_parameters())
    for group in job.optimizer.param_groups:
        missing = [p for p in group["params"] if id(p) not in held]
        if missing:
            raise ConfigError("distributed: fsdp needs an optimizer that holds parameters of the model only")
        group["params"] = [now[held[id(p)]] for p in group["params"]]
