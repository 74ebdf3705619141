"""The loop of `steadystep train`: the guard's own face, and nothing a user could not write."""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

from steadystep import faults
from steadystep.errors import ConfigError, SteadystepError
from steadystep.guard import Guard
from steadystep.parallel import Through
from steadystep.records import Diagnosis, Outcome
from steadystep.runs.diagnosis import headline
from steadystep.runs.run import Run
from steadystep.runs.run_log import read
from steadystep.tracking import Sink
from steadystep.train import RunPlan, RunSettings, Summary
from steadystep.train.job import Job, Tasks, make, split

Strategy = Literal["ddp", "fsdp"]

_APART = 1_000_003  # between the seeds of two ranks
_ON_POLICY = ("policy", "grpo")
_TIMEOUT = timedelta(minutes=10)


@final
class Crew:
    """All processes that torchrun started for this run; one is a crew too."""

    def __init__(self, kind: Strategy | None = None, *, rank: int = 0, size: int = 1) -> None:
        self.kind, self.rank, self.size = kind, rank, size

    @classmethod
    def join(cls, kind: Strategy | None) -> "Crew":
        """Meet the others. Without torchrun there are none."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if kind is None:
            raise ConfigError(f"torchrun started {size} processes: set distributed: ddp or fsdp in the file")
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

    def spread(self, job: Job, settings: RunSettings, tasks: Tasks | None = None) -> None:
        """Other batches for every rank, and one model for all."""
        if self.size == 1:
            return
        if settings.task in _ON_POLICY:
            raise ConfigError(f"task {settings.task!r} draws its batches from the model: run it in one process")
        seed = settings.seed + _APART * self.rank
        others = make(settings.task, seed, tasks) if self.rank and job.draws else job
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


OnStep = Callable[[Outcome, Guard], None]


def prepare_folder(run_dir: Path, plan: Path, *, resume: bool) -> None:
    """A folder belongs to one run: a second one needs another, or `--resume`."""
    used = (run_dir / "run.jsonl").exists() or (run_dir / "checkpoints").exists()
    if used and not resume:
        raise ConfigError(f"{run_dir} already contains a run: continue it with --resume, or use another --run-dir")
    if resume and not used:
        raise ConfigError(f"{run_dir} contains no run to continue: omit --resume to start one")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not resume:
            shutil.copyfile(plan, run_dir / "config.yaml")
    except OSError as error:
        raise ConfigError(f"{run_dir}: cannot be written ({error.strerror})") from None


def train(
    plan: RunPlan,
    run_dir: Path,
    *,
    watch: OnStep = lambda outcome, guard: None,
    sinks: Sequence[Sink] = (),
    crew: Crew | None = None,
    force: bool = False,
    tasks: Tasks | None = None,
) -> Summary:
    """Train until `training.total_steps` have been tried or validation stops improving; resume automatically.

    Args:
        plan: what to train, and the settings of the guard.
        run_dir: folder of the run; a run in it is continued.
        watch: called after each step.
        sinks: additional sinks.
        crew: the processes of a distributed run.
        force: use `run_dir` even if another process is using it.
        tasks: factories by name that the plan may give; left out: the built-in tasks.
    """
    started, settings = time.perf_counter(), plan.run
    job, fault = _prepared(settings, crew or Crew(), tasks)
    guard = _guarded(job, run_dir, config=plan.guard, sinks=sinks, force=force)
    total, began = plan.guard.training.total_steps, guard.attempts
    told = Told(job, guard, settings.validation_frequency)
    with guard:
        while guard.attempts < total and not guard.should_stop:
            before = guard.attempts
            job.begin(guard.epoch)
            for outcome in _one_pass(job, guard, fault):
                watch(outcome, guard)
                told.now_and_then()
                if guard.attempts >= total or guard.should_stop:
                    break
            if guard.attempts == before:
                raise ConfigError(f"task {settings.task!r}: its loader yields no batches")
        told.at_the_end()
        diagnosed = guard.diagnose()
    rank, seconds = (crew or Crew()).rank, time.perf_counter() - started
    return _summary(run_dir, guard, diagnosed, trained=guard.attempts - began, seconds=seconds, rank=rank)


def _summary(
    run_dir: Path, guard: Guard, diagnosed: Sequence[Diagnosis], *, trained: int, seconds: float, rank: int
) -> Summary:
    run = _logged(run_dir)
    return Summary(
        run_dir=str(run_dir),
        steps=guard.attempts,
        updates=guard.updates,
        trained=trained,
        final_loss=math.nan if run.final_loss is None else run.final_loss,
        validation=run.last_validation,
        best_validation=run.best_validation,
        incidents=run.num_incidents,
        interventions=run.num_interventions,
        stopped_early=guard.should_stop,
        seconds=seconds,
        diagnosis=tuple(f"{d.cause}: {d.advice}" if d.advice else d.cause for d in diagnosed[:3]),
        verdict=headline(run).said if rank == 0 else "",
    )


def _one_pass(job: Job, guard: Guard, fault: faults.Fault) -> Iterator[Outcome]:
    """Step through the job's batches once; yield what became of each group of micro-batches."""
    for batch in guard.batches(job.batches):
        step = guard.attempts
        with fault.at(step):
            outcome = guard.step(
                lambda batch, step=step: fault.loss(step, job.loss(batch)), batch=fault.batch(step, batch)
            )
        if outcome.pending:
            continue
        if job.after_step is not None:
            job.after_step()
        yield outcome


def _logged(run_dir: Path) -> Run:
    """The run as its log tells it, which is what every other view shows; rank 0 writes it."""
    try:
        return read(run_dir)
    except ConfigError:  # why: a log that could not be written, or that another rank still writes
        return Run(name=run_dir.name, path=run_dir, source="steadystep")


def _prepared(settings: RunSettings, crew: Crew, tasks: Tasks | None) -> tuple[Job, faults.Fault]:
    """What is trained on this rank, and what goes wrong on it."""
    job = make(settings.task, settings.seed, tasks)
    job.prepare(settings)
    for declared in crew.faults(settings.faults):  # those of all ranks first: a mistake must be found on every rank
        fault = faults.parse(declared, model=job.model, optimizer=job.optimizer, seed=settings.seed)
    crew.spread(job, settings, tasks)
    return job, fault


def _guarded(job: Job, run_dir: Path, **asked: Any) -> Guard:
    guard = Guard.resume(job.model, job.optimizer, run_dir=run_dir, **asked)
    for name, thing in job.keep.items():
        guard.keep(name, thing)
    return guard


@final
class Told:
    """Validations, when they are due."""

    def __init__(self, job: Job, guard: Guard, every: int) -> None:
        self._job, self._guard, self._every = job, guard, every
        self._at = guard.attempts

    def now_and_then(self) -> None:
        """After a step."""
        if self._guard.attempts % self._every == 0:
            self._validate()

    def at_the_end(self) -> None:
        """Unless that was just done, or this process had no step left to take."""
        if self._at != self._guard.attempts or not self._guard.attempts:
            self._validate()

    def _validate(self) -> None:
        if self._job.validate is None:
            return
        self._at = self._guard.attempts
        self._guard.validate(float(self._job.validate()))
