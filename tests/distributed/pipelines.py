"""A small model in pipeline stages, guarded or not. Run as a program it forks its ranks.

Arguments: number of ranks, then the names of checks ("norms 1f1b"); without any, all of that number of ranks.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import steadystep
from steadystep._utils.tensors import local_part
from tests.distributed.forked import counted, main
from tests.distributed.setting import assert_finite, assert_one_decision, assert_same, everywhere, tensors_of

MODES = {2: ("gpipe", "1f1b", "interleaved"), 4: ("deep", "ddp", "fsdp")}
"""By ranks. `deep`: four stages; `ddp`, `fsdp`: two stages, each on two ranks."""
STEPS, MICRO, FAULT, DEPTH = 8, 4, 12, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    """Keeps the width, so that any of them may be a stage; counts its calls in a buffer."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 16), nn.Linear(16, 6)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


def blocks(dropout: float = 0.0) -> list[Block]:
    torch.manual_seed(0)
    return [Block(dropout=dropout) for _ in range(DEPTH)]


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Pipeline:
    """The stages of this rank, their optimizer and the schedule that runs them."""

    def __init__(self, mode: str, *, dropout: float = 0.0) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        stages, group = (2, None) if size == 2 else (size, None)
        mesh = None
        self.place = 0
        if mode in ("ddp", "fsdp"):
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "stages"))
            stages, group, self.place = 2, mesh["stages"].get_group(), mesh["data"].get_local_rank()
            rank = mesh["stages"].get_local_rank()
        whole = blocks(dropout)
        count = DEPTH if mode == "interleaved" else stages
        here = [i for i in range(count) if i % stages == rank]
        self.parts = [nn.Sequential(*whole[i * DEPTH // count : (i + 1) * DEPTH // count]) for i in here]
        self.model: nn.Module = self.parts[0] if len(here) == 1 else nn.ModuleList(self.parts)
        if mode == "ddp":
            self.parts = [DistributedDataParallel(self.parts[0], process_group=mesh["data"].get_group())]
        if mode == "fsdp":
            for block in self.parts[0]:
                fully_shard(block, mesh=mesh["data"])
            fully_shard(self.parts[0], mesh=mesh["data"])
        made = [PipelineStage(part, i, count, CPU, group=group) for part, i in zip(self.parts, here, strict=True)]
        self.first, self.last = here[0] == 0, here[-1] == count - 1
        self.schedule: Any
        if mode == "interleaved":
            self.schedule = ScheduleInterleaved1F1B(made, MICRO, loss_fn=loss_fn)
        else:
            self.schedule = (ScheduleGPipe if mode == "gpipe" else Schedule1F1B)(made[0], MICRO, loss_fn=loss_fn)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self, batch: tuple[Tensor, Tensor]) -> Tensor | None:
        """Forward and backward of one batch; the loss where the last stage is."""
        losses: list[Tensor] = []
        given = (batch[0],) if self.first else ()
        more = {"target": batch[1], "losses": losses} if self.last else {}
        self.schedule.step(*given, **more)
        return torch.stack(losses).mean() if self.last else None


def batch(step: int, place: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + place))
    return x, x.flip(-1)


def plain_run(mode: str, *, max_norm: float | None = None, steps: int = STEPS) -> dict[str, Tensor]:
    pipeline = Pipeline(mode)
    for step in range(steps):
        pipeline.run(batch(step, pipeline.place))
        pipeline.optimizer.step()
        pipeline.optimizer.zero_grad()
    return tensors_of(pipeline.model, pipeline.optimizer)


Spoil = Callable[[int, Pipeline, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


def guarded_run(
    mode: str, *, spoil: Spoil | None = None, steps: int = STEPS, dropout: float = 0.0, **settings: Any
) -> tuple[nn.Module, Optimizer, list[steadystep.Outcome]]:
    """`spoil(step, pipeline, batch)` breaks something on this rank and returns the batch."""
    pipeline = Pipeline(mode, dropout=dropout)
    torch.manual_seed(1 + dist.get_rank())
    outcomes = []
    with steadystep.Guard(pipeline.model, pipeline.optimizer, **settings) as guard:
        for step in range(steps):
            given = batch(step, pipeline.place)
            given = given if spoil is None else spoil(step, pipeline, given)
            outcomes.append(guard.step(pipeline.run, batch=given))
    return pipeline.model, pipeline.optimizer, outcomes


def healthy(mode: str) -> None:
    """Bit-identical to the same schedule without a guard; every rank holds the loss and all names."""
    model, optimizer, outcomes = guarded_run(mode)
    assert [o.plan.actions for o in outcomes if o.plan.actions] == []
    assert_same(plain_run(mode), tensors_of(model, optimizer))
    assert_one_decision(outcomes)
    signals = outcomes[-1].signals
    assert signals is not None
    assert len(signals.names) == 6 * DEPTH
    assert len({name.partition(".")[0] for name in signals.names}) == (
        2 if mode in ("gpipe", "1f1b", "ddp", "fsdp") else 4
    )


def norms(mode: str) -> None:
    """Loss and norms of one process that has the whole model and all batches; clipped to a limit by all stages."""
    whole = nn.Sequential(*blocks())
    places = sorted(set(everywhere(Pipeline(mode).place)))
    batches = [batch(0, place) for place in places]
    loss = sum(loss_fn(whole(x), y) for x, y in batches) / len(places)
    loss.backward()
    expected = [float(p.grad.norm()) for p in whole.parameters()]
    total = math.hypot(*expected)
    for max_norm in (None, 0.5 * total):
        held = []
        pipeline = Pipeline(mode)
        pipeline.optimizer.register_step_pre_hook(lambda o, a, k: held.append(_grads(o)))  # noqa: B023
        with steadystep.Guard(
            pipeline.model, pipeline.optimizer, config={"training": {"max_grad_norm": max_norm}}
        ) as guard:
            outcome = guard.step(pipeline.run, batch=batch(0, pipeline.place))
        signals = outcome.signals
        assert signals is not None
        assert math.isclose(outcome.loss, float(loss), rel_tol=1e-6), (outcome.loss, float(loss))
        assert math.isclose(signals.grad_norm, total, rel_tol=1e-6), (mode, signals.grad_norm, total)
        for name, norm, value in zip(signals.names, signals.norms, expected, strict=True):
            assert math.isclose(norm, value, rel_tol=1e-5, abs_tol=1e-7), (mode, name, norm, value)
        squares = everywhere(held[0])
        copies = 2 if mode == "ddp" else 1
        wanted = total if max_norm is None else max_norm
        assert math.isclose(math.sqrt(sum(squares) / copies), wanted, rel_tol=1e-5)


def _grads(optimizer: Optimizer) -> float:
    grads = [local_part(p.grad) for group in optimizer.param_groups for p in group["params"]]
    return float(sum(grad.double().square().sum() for grad in grads))


def nan(mode: str) -> None:
    """In the batch, then in the activations of each rank in turn: refused on all, and its origin is named."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def spoil(step: int, pipeline: Pipeline, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if step == 1:
            return given[0] * math.nan, given[1]
        part = next(module for module in pipeline.model.modules() if isinstance(module, Block))
        part.drop.forward = (lambda x: x * math.nan) if step == 2 + rank else (lambda x: x)  # type: ignore[method-assign]
        return given

    model, optimizer, outcomes = guarded_run(mode, spoil=spoil)
    refused = [o.step for o in outcomes if not o.stepped]
    assert refused == [1, *(2 + each for each in range(size))], refused
    assert_one_decision(outcomes)
    assert "batch[0] holds NaN" in outcomes[1].origin, outcomes[1].origin
    for each in range(size):
        assert outcomes[2 + each].origin.startswith(f"rank {each}: stage"), outcomes[2 + each].origin
    assert_finite(model, optimizer)


def replay(mode: str) -> None:
    """A weight turns NaN on each rank in turn: all stages roll back, replay, and end where a healthy run does."""
    settings = {"config": {"recovery": {"trust_steps": 4}}, "steps": FAULT + 4, "dropout": 0.2}
    whole, slots, _ = guarded_run(mode, **settings)
    expected = tensors_of(whole, slots)
    for bad in range(dist.get_world_size()):

        def spoil(step: int, pipeline: Pipeline, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            if step == FAULT and dist.get_rank() == bad:  # noqa: B023
                with torch.no_grad():
                    local_part(next(iter(pipeline.model.parameters()))).view(-1)[0] = math.nan
            return given

        model, optimizer, outcomes = guarded_run(mode, spoil=spoil, **settings)
        back = outcomes[FAULT]
        assert (back.restored, back.exact) == (FAULT + 1, True), (
            bad,
            back.restored,
            back.replayed,
            back.exact,
            back.plan,
        )
        assert all(o.stepped for o in outcomes[FAULT + 1 :])
        assert_one_decision(outcomes)
        assert_same(expected, tensors_of(model, optimizer))


def failing(mode: str) -> None:
    """A closure that fails on one rank when it is run again, before or after the schedule: the replay ends on all."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for early in (True, False):
        pipeline, outcomes, replaying = Pipeline(mode), [], False

        def closure(given: tuple[Tensor, Tensor]) -> Tensor | None:
            fails = replaying and rank == last and bool(torch.equal(given[0], batch(6, pipeline.place)[0]))  # noqa: B023
            if fails and early:  # noqa: B023
                raise KeyError("gone")
            loss = pipeline.run(given)  # noqa: B023
            if fails:
                raise KeyError("gone")
            return loss

        with steadystep.Guard(pipeline.model, pipeline.optimizer, config={"recovery": {"trust_steps": 4}}) as guard:
            for step in range(FAULT + 3):
                replaying = step == FAULT
                if step == FAULT and rank == last:
                    with torch.no_grad():
                        local_part(next(iter(pipeline.model.parameters()))).view(-1)[0] = math.nan
                outcomes.append(guard.step(closure, batch=batch(step, pipeline.place)))
        back = outcomes[FAULT]
        assert back.restored is not None
        assert back.restored <= 6, back.restored
        assert all(o.stepped for o in outcomes[FAULT + 1 :])
        assert_one_decision(outcomes)
        assert_finite(pipeline.model, pipeline.optimizer)


def resume(mode: str) -> None:
    """Saved in the middle and loaded by other stages: the same bits as a run that was not interrupted."""
    folder = Path(everywhere(tempfile.mkdtemp())[0])
    pipeline = Pipeline(mode)
    with steadystep.Guard(pipeline.model, pipeline.optimizer) as guard:
        for step in range(6):
            if step == 3:
                guard.save(folder / "saved")
            guard.step(pipeline.run, batch=batch(step, pipeline.place))
    whole = tensors_of(pipeline.model, pipeline.optimizer)
    pipeline = Pipeline(mode)
    model, optimizer = pipeline.model, pipeline.optimizer
    pipeline.run(batch(0, 0))  # a stage makes one more forward pass in its first step, to learn the shapes
    optimizer.zero_grad()
    with steadystep.Guard.resume(model, optimizer, path=folder / "saved", run_dir=folder / "run") as guard:
        for step in range(3, 6):
            guard.step(pipeline.run, batch=batch(step, pipeline.place))
    assert_same(whole, tensors_of(model, optimizer))


def collectives(mode: str) -> None:
    """One a step beyond the engine's own; three when a guard is made: settings, and the names of all stages."""
    steps = 3
    more = counted(lambda: guarded_run(mode, steps=steps, config={"mode": "careful"}))
    more.subtract(counted(lambda: plain_run(mode, steps=steps)))
    assert (more["gloo:all_reduce"], more["gloo:all_gather"]) == (steps, 3), more
    assert not any(count for name, count in more.items() if name not in ("gloo:all_reduce", "gloo:all_gather")), more


def watched(mode: str) -> None:
    """`watch` with the loss given where the last stage is: bit-identical; NaN refused on all; rolled back together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for fault in (None, "batch", "weight"):
        pipeline, outcomes = Pipeline(mode), []
        with steadystep.watch(pipeline.model, pipeline.optimizer, config={"recovery": {"trust_steps": 4}}) as watcher:
            for step in range(FAULT + 4 if fault == "weight" else STEPS):
                x, y = batch(step, pipeline.place)
                if fault == "weight" and (step, rank) == (FAULT, size - 1):
                    with torch.no_grad():
                        local_part(next(iter(pipeline.model.parameters()))).view(-1)[0] = math.nan
                loss = pipeline.run((x * math.nan if fault == "batch" and step == 2 else x, y))
                if loss is not None:
                    watcher.loss(loss)
                pipeline.optimizer.step()
                pipeline.optimizer.zero_grad()
                outcomes.append(watcher.outcome)
        assert_one_decision(outcomes)
        assert_finite(pipeline.model, pipeline.optimizer)
        if fault is None:
            assert_same(plain_run(mode), tensors_of(pipeline.model, pipeline.optimizer))
        elif fault == "batch":
            assert [o.step for o in outcomes if not o.stepped] == [2]
        else:
            assert outcomes[FAULT].restored is not None
            assert all(o.stepped for o in outcomes[FAULT + 1 :])


CHECKS = {
    "healthy": healthy,
    "norms": norms,
    "nan": nan,
    "replay": replay,
    "failing": failing,
    "resume": resume,
    "collectives": collectives,
    "watched": watched,
}

if __name__ == "__main__":
    sys.exit(main(CHECKS, MODES, int(sys.argv[1]), sys.argv[2:]))
