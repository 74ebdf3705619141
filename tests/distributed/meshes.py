"""One small model on any mesh, guarded or not. Run as a program it forks its ranks: torch is imported once for all.

Arguments: number of ranks, then the names of checks ("norms tp"); without any, all of that number of ranks.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import steadystep
from steadystep import clip
from steadystep._utils.tensors import local_part
from tests.distributed.forked import counted, main
from tests.distributed.setting import assert_finite, assert_one_decision, assert_same, everywhere, tensors_of

ONE_MESH = ("ddp", "fsdp", "tp", "sp")
MODES = {2: ONE_MESH, 4: (*ONE_MESH, "hsdp", "fsdp tp", "fsdp sp", "submesh")}
"""By ranks. `sp`: tensor and sequence parallelism, with replicated DTensors whose gradients are partial sums;
`submesh`: tensor parallelism over two of four ranks, twice."""
STEPS = 8
FAULT = 12


class Turned(nn.Linear):
    """A linear layer with a rotary table, which tensor parallelism makes a DTensor, and a count of its calls."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.register_buffer("angles", torch.linspace(0.5, 1.5, width))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return nn.functional.linear(x * self.angles, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = Turned(width, 16), nn.Linear(16, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), Block(8, dropout=dropout), nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.block(self.first(x))))


def parallel_plan(*, sequence: bool) -> dict[str, Any]:
    if not sequence:
        return {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
    split = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1), "use_local_input": True}
    joined = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    return {
        "block": PrepareModuleInputOutput(**split, **joined),
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def made(mode: str, *, lr: float = 1e-2, dropout: float = 0.0) -> tuple[nn.Module, Optimizer, int]:
    """Model and optimizer of a mode, and which of the batches of a step this rank gets."""
    torch.manual_seed(0)
    net, size, rank = Net(dropout=dropout), dist.get_world_size(), dist.get_rank()
    model: nn.Module = net
    if mode == "ddp":
        model = DistributedDataParallel(net)
    elif mode == "fsdp":
        sharded(net, init_device_mesh("cpu", (size,)))
    elif mode == "hsdp":
        sharded(net, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    else:
        across = size if mode in ONE_MESH else 2
        mesh = init_device_mesh("cpu", (size // across, across), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], parallel_plan(sequence=mode.endswith("sp")))
        if mode.startswith("fsdp"):
            sharded(net, mesh["data"])
        rank = mesh["data"].get_local_rank() if mode.startswith("fsdp") else 0
    return model, torch.optim.AdamW(model.parameters(), lr=lr), rank


def sharded(net: Net, mesh: DeviceMesh) -> None:
    for part in (net.block.up, net.block, net):
        fully_shard(part, mesh=mesh)


def batch(step: int, place: int) -> Tensor:
    return torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1000 * step + place))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - x.sum(-1)).square().mean()


def plain_run(mode: str, *, max_norm: float | None = None, steps: int = STEPS) -> dict[str, Tensor]:
    model, optimizer, place = made(mode)
    for step in range(steps):
        loss_of(model, batch(step, place)).backward()
        if max_norm is not None:
            clipped(mode, model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return tensors_of(model, optimizer)


def clipped(mode: str, model: nn.Module, max_norm: float) -> None:
    """By torch where it can, which is where all parameters are on one mesh; else by ours."""
    if mode in ("ddp", "fsdp", "hsdp"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    else:
        clip.clip_global_norm_(model.parameters(), max_norm)


def guarded_run(
    mode: str,
    *,
    spoil: Callable[[int, nn.Module, Tensor], Tensor] | None = None,
    steps: int = STEPS,
    dropout: float = 0.0,
    **settings: Any,
) -> tuple[nn.Module, Optimizer, list[steadystep.Outcome]]:
    """`spoil(step, model, x)` breaks something on this rank and returns the batch."""
    model, optimizer, place = made(mode, dropout=dropout)
    torch.manual_seed(1 + place)
    outcomes = []
    with steadystep.Guard(model, optimizer, **settings) as guard:
        for step in range(steps):
            x = batch(step, place)
            x = x if spoil is None else spoil(step, model, x)
            outcomes.append(guard.step(lambda x: loss_of(model, x), batch=x))
    return model, optimizer, outcomes


def healthy(mode: str) -> None:
    """Bit-identical to the same engine without a guard, clipped or not."""
    for max_norm in (None, 0.5):
        plain = plain_run(mode, max_norm=max_norm)
        model, optimizer, outcomes = guarded_run(mode, config={"training": {"max_grad_norm": max_norm}})
        assert [o.plan.actions for o in outcomes if o.plan.actions] == []
        if mode == "sp" and max_norm is not None:  # partial sums are added up before they are scaled, not after
            for name, value in tensors_of(model, optimizer).items():
                torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-6)
        else:
            assert_same(plain, tensors_of(model, optimizer))
        assert_one_decision(outcomes)


def norms(mode: str) -> None:
    """Those of one process that has all batches, and the same from the standalone function."""
    torch.manual_seed(0)
    whole, (model, optimizer, place) = Net(), made(mode)
    places = sorted(set(everywhere(place)))
    sum(loss_of(whole, batch(0, each)) for each in places).div(len(places)).backward()
    expected = {name: float(p.grad.norm()) for name, p in whole.named_parameters()}
    total = math.hypot(*expected.values())
    loss_of(model, batch(0, place)).backward()
    report = clip.clip_global_norm_(model.parameters(), max_norm=math.inf)
    assert math.isclose(report.norm_before, total, rel_tol=1e-6), (mode, report.norm_before, total)
    optimizer.zero_grad()
    with steadystep.Guard(model, optimizer) as guard:
        signals = guard.step(lambda x: loss_of(model, x), batch=batch(0, place)).signals
    assert signals is not None
    assert math.isclose(signals.grad_norm, total, rel_tol=1e-6), (mode, signals.grad_norm, total)
    for name, norm in zip(signals.names, signals.norms, strict=True):
        assert math.isclose(norm, expected[name], rel_tol=1e-5, abs_tol=1e-7), (mode, name, norm, expected[name])


def nan(mode: str) -> None:
    """On each rank in turn, in the batch: refused on all, and the weights are those of a run without that batch."""
    ranks = range(dist.get_world_size())

    def spoil(step: int, _: nn.Module, x: Tensor) -> Tensor:
        return x * math.nan if step == 2 + dist.get_rank() else x

    model, optimizer, outcomes = guarded_run(mode, spoil=spoil)
    assert [o.step for o in outcomes if not o.stepped] == [2 + rank for rank in ranks], mode
    assert_one_decision(outcomes)
    assert_finite(model, optimizer)
    assert_consistent(model)


def assert_consistent(model: nn.Module) -> None:
    """All ranks that hold the same part of a weight hold the same bits."""
    mine = {}
    for name, parameter in model.named_parameters():
        where: tuple[Any, ...] = ()
        if isinstance(parameter, DTensor):
            mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
            where = tuple(i for i, how in zip(at, parameter.placements, strict=True) if not how.is_replicate())
            where += (mesh.size(),)
        mine[name, where] = local_part(parameter).detach().numpy().tobytes()
    seen: dict[Any, bytes] = {}
    for held in everywhere(mine):
        for key, value in held.items():
            assert seen.setdefault(key, value) == value, key


def replay(mode: str) -> None:
    """A weight turns NaN on the last rank: all roll back, replay every update and end where a healthy run does."""

    def spoil(step: int, model: nn.Module, x: Tensor) -> Tensor:
        if step == FAULT and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                local_part(next(iter(model.parameters()))).view(-1)[0] = math.nan
        return x

    settings = {"config": {"recovery": {"trust_steps": 4}}, "steps": FAULT + 4, "dropout": 0.2}
    whole, slots, _ = guarded_run(mode, **settings)
    model, optimizer, outcomes = guarded_run(mode, spoil=spoil, **settings)
    back = outcomes[FAULT]
    assert (back.restored, back.exact) == (FAULT + 1, True), (back.restored, back.replayed, back.exact, back.plan)
    assert all(o.stepped for o in outcomes[FAULT + 1 :])
    assert_one_decision(outcomes)
    assert_same(tensors_of(whole, slots), tensors_of(model, optimizer))
    assert_consistent(model)


def failing(mode: str) -> None:
    """A closure that fails on one rank when it is run again, before or after the model: the replay ends on all."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for early in (True, False):
        model, optimizer, place = made(mode)
        outcomes = []
        replaying = False

        def closure(x: Tensor) -> Tensor:
            fails = replaying and rank == last and bool(torch.equal(x, batch(6, place)))  # noqa: B023
            if fails and early:  # noqa: B023
                raise KeyError("gone")
            loss = loss_of(model, x)  # noqa: B023
            if fails:
                raise KeyError("gone")
            return loss

        with steadystep.Guard(model, optimizer, config={"recovery": {"trust_steps": 4}}) as guard:
            for step in range(FAULT + 3):
                replaying = step == FAULT
                if step == FAULT and rank == last:
                    with torch.no_grad():
                        local_part(next(iter(model.parameters()))).view(-1)[0] = math.nan
                outcomes.append(guard.step(closure, batch=batch(step, place)))
        back = outcomes[FAULT]
        assert back.restored is not None
        assert back.restored <= 6, back.restored
        assert all(o.stepped for o in outcomes[FAULT + 1 :])
        assert_one_decision(outcomes)
        assert_finite(model, optimizer)
        assert_consistent(model)


def warmed_up(mode: str) -> tuple[nn.Module, Optimizer, int]:
    """After one backward pass DDP rearranges its buckets, and more than two ranks add up in another order then."""
    model, optimizer, place = made(mode)
    if mode == "ddp":
        loss_of(model, batch(0, place)).backward()
        optimizer.zero_grad()
    return model, optimizer, place


def resume(mode: str) -> None:
    """Saved in the middle and loaded by another model: the same bits as a run that was not interrupted."""
    folder = Path(everywhere(tempfile.mkdtemp())[0])
    model, optimizer, place = warmed_up(mode)
    with steadystep.Guard(model, optimizer) as guard:
        for step in range(6):
            if step == 3:
                guard.save(folder / "saved")
            guard.step(lambda x: loss_of(model, x), batch=batch(step, place))
    whole = tensors_of(model, optimizer)
    model, optimizer, place = warmed_up(mode)
    with steadystep.Guard.resume(model, optimizer, path=folder / "saved", run_dir=folder / "run") as guard:
        for step in range(3, 6):
            guard.step(lambda x: loss_of(model, x), batch=batch(step, place))
    assert_same(whole, tensors_of(model, optimizer))


def collectives(mode: str) -> None:
    """One a step beyond the engine's own; and when a guard is made, one to compare settings and one to count copies."""
    steps = 3
    more = counted(lambda: guarded_run(mode, steps=steps, config={"mode": "careful"}))
    more.subtract(counted(lambda: plain_run(mode, steps=steps)))
    small = mode in ("fsdp tp", "fsdp sp", "submesh")  # a mesh smaller than the world
    assert more["gloo:all_gather"] == 1, more
    if mode == "sp":  # a partial sum is added up once instead of by each operation of the optimizer
        assert more["gloo:all_reduce"] <= steps
    else:
        assert more["gloo:all_reduce"] == steps + small, more


def watched(mode: str) -> None:
    """`watch`: bit-identical; NaN on each rank refused on all; damaged weights are rolled back, without replay."""
    plain, rank, size = plain_run(mode), dist.get_rank(), dist.get_world_size()
    for fault in (None, "batch", "weight"):
        model, optimizer, place = made(mode)
        outcomes: list[steadystep.Outcome] = []
        config = {"recovery": {"trust_steps": 4}}
        with steadystep.watch(model, optimizer, config=config) as watcher:
            for step in range(FAULT + 4 if fault == "weight" else STEPS):
                x = batch(step, place)
                if fault == "batch" and step == 2 + rank:
                    x = x * math.nan
                if fault == "weight" and (step, rank) == (FAULT, size - 1):
                    with torch.no_grad():
                        local_part(next(iter(model.parameters()))).view(-1)[0] = math.nan
                loss_of(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
                outcomes.append(watcher.outcome)
        assert_one_decision(outcomes)
        assert_finite(model, optimizer)
        assert_consistent(model)
        if fault is None:
            assert_same(plain, tensors_of(model, optimizer))
        if fault == "batch":
            assert [o.step for o in outcomes if not o.stepped] == [2 + each for each in range(size)]
        if fault == "weight":
            back = outcomes[FAULT]
            assert (back.restored is not None, back.replayed) == (True, 0), back
            assert all(o.stepped for o in outcomes[FAULT + 1 :])


def late(mode: str) -> None:
    """One rank is slow: the run is that of equal ranks."""
    plain = plain_run(mode)

    def spoil(step: int, _: nn.Module, x: Tensor) -> Tensor:
        if dist.get_rank() == 0 and step in (2, 5):
            time.sleep(1.0)
        return x

    model, optimizer, outcomes = guarded_run(mode, spoil=spoil)
    assert [o.plan.actions for o in outcomes if o.plan.actions] == []
    assert_same(plain, tensors_of(model, optimizer))
    assert_one_decision(outcomes)


def unlearnable(mode: str) -> None:
    """Targets of noise: the mesh is not what is blamed for it, whatever stands in for the weights in a forward pass."""
    model, optimizer, place = made(mode)
    noise = torch.Generator().manual_seed(place)
    with steadystep.Guard(model, optimizer) as guard:
        for step in range(60):
            x, y = batch(step, place), torch.randn(4, 4, generator=noise)
            guard.step(lambda x, y=y: (model(x).squeeze(-1) - y).square().mean(), batch=x)
        said = [str(found) for found in guard.diagnose()]
    assert not [text for text in said if "optimizer" in text.partition("try:")[0]], said


CHECKS = {
    "late": late,
    "healthy": healthy,
    "norms": norms,
    "nan": nan,
    "replay": replay,
    "failing": failing,
    "resume": resume,
    "collectives": collectives,
    "watched": watched,
    "unlearnable": unlearnable,
}


if __name__ == "__main__":
    sys.exit(main(CHECKS, MODES, int(sys.argv[1]), sys.argv[2:]))
