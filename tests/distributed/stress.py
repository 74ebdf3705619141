"""Ranks under stress: one runs out of memory, one is slow, loaders end at different times. Run as a program it forks.

Arguments: number of ranks, then the names of checks ("memory forward"); without any, all of them.
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import steadystep
from tests.distributed.forked import main
from tests.distributed.setting import assert_one_decision, assert_replicas

STEPS = 10
PLACES = ("before", "forward", "loss", "backward", "start")


class Fails(torch.autograd.Function):
    """Does nothing, and has no memory for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise no_memory()


def no_memory() -> RuntimeError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Net(nn.Module):
    """Fails at one place with more than `most` rows; some parameters are used by other calls alone."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()
        self.register_buffer("shift", torch.zeros(12))
        self.middle, self.last = nn.Linear(12, 12), nn.Linear(12, 1)
        self.unused = nn.Linear(12, 12)
        self.place, self.most = "", 1 << 30

    def fails_at(self, place: str, x: Tensor) -> bool:
        return place == self.place and len(x) > self.most

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)) + self.shift)
        if self.fails_at("forward", x):
            raise no_memory()
        hidden = Fails.apply(hidden) if self.fails_at("backward", x) else hidden
        out = self.last(torch.tanh(self.middle(hidden)))
        return Fails.apply(out) if self.fails_at("start", x) else out


def made(*, norm: bool = False, **options: Any) -> tuple[DistributedDataParallel, Net, Optimizer]:
    torch.manual_seed(0)
    net = Net(norm=norm)
    if not options.get("find_unused_parameters"):
        del net.unused
    model = DistributedDataParallel(net, **options)
    return model, net, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int, rank: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def closure_of(model: nn.Module, net: Net) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        if net.fails_at("before", x):
            raise no_memory()
        out = model(x)
        if net.fails_at("loss", x):
            raise no_memory()
        return (out.squeeze(-1) - x.sum(-1)).square().mean()

    return loss


def run(
    place: str, *, on: tuple[int, ...] = (), at: tuple[int, ...] = (), most: int = 3, group: int = 1, **options: Any
) -> tuple[DistributedDataParallel, Optimizer, list[steadystep.Outcome]]:
    """`on` those ranks and `at` those micro-batches more than `most` rows do not fit."""
    model, net, optimizer = made(**options)
    config = {"training": {"gradient_accumulation_steps": group}}
    rank, outcomes, loss = dist.get_rank(), [], closure_of(model, net)
    with warnings.catch_warnings(), steadystep.Guard(model, optimizer, config=config) as guard:
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            net.place, net.most = (place, most) if rank in on and step in at else ("", 1 << 30)
            outcome = guard.step(loss, batch=batch(step, rank))
            outcomes += [] if outcome.pending else [outcome]
        guard.flush()
    return model, optimizer, outcomes


def assert_close(left: nn.Module, right: nn.Module) -> None:
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def _splits(place: str, **options: Any) -> None:
    """The update is made, of the same batch in parts, on all ranks: nothing is lost and nobody waits."""
    last = dist.get_world_size() - 1
    healthy = run("", **options)[0]
    for on, at in (((last,), (4,)), ((0,), (0, 1, 7)), (tuple(range(last + 1)), (3,)), ((0,), (STEPS - 1,))):
        model, optimizer, outcomes = run(place, on=on, at=at, **options)
        assert all(outcome.stepped for outcome in outcomes)
        assert_one_decision(outcomes)
        assert_replicas(model, optimizer)
        if not options.get("norm"):  # statistics of parts are others
            assert_close(healthy, model)


def memory(place: str) -> None:
    _splits(place)
    _splits(place, norm=True)


def accumulated(place: str) -> None:
    _splits(place, group=3)
    _splits(place, group=2, norm=True)


def unused(place: str) -> None:
    _splits(place, find_unused_parameters=True)
    _splits(place, gradient_as_bucket_view=True, broadcast_buffers=False)


def hopeless(place: str) -> None:
    """A row that does not fit, and a batch that cannot be split: the same error on all ranks."""
    last = dist.get_world_size() - 1
    with pytest.raises(steadystep.TrainingHalted, match=f"out of memory on rank {last}: CUDA out of memory"):
        run(place, on=(last,), at=(4,), most=0)
    model, net, optimizer = made()
    loss, x = closure_of(model, net), batch(0, dist.get_rank())
    guard = steadystep.Guard(model, optimizer)
    guard.step(lambda: loss(x))
    net.place, net.most = (place, 3) if dist.get_rank() == last else ("", 0)
    with pytest.raises(steadystep.TrainingHalted, match="cannot be split"):
        guard.step(lambda: loss(x))
    net.place = ""
    assert guard.step(lambda: loss(x)).stepped
    assert_replicas(model, optimizer)
    guard.close()


def replay(place: str) -> None:
    """A weight turns NaN, and one rank has no memory for a batch when it is replayed: all ranks go on together."""
    rank, fault, steps = dist.get_rank(), 24, 28
    model, net, optimizer = made()
    inner, outcomes = closure_of(model, net), []

    def loss(x: Tensor) -> Tensor:
        tight = len(outcomes) == fault and rank == 0 and torch.equal(x, batch(fault - 2, rank))
        net.place, net.most = (place, 3) if tight else ("", 1 << 30)
        return inner(x)

    with (
        warnings.catch_warnings(),
        steadystep.Guard(model, optimizer, config={"recovery": {"trust_steps": 4}}) as guard,
    ):
        warnings.simplefilter("ignore")
        for step in range(steps):
            if step == fault and rank == dist.get_world_size() - 1:
                with torch.no_grad():
                    net.first.weight[0, 0] = float("nan")
            outcomes.append(guard.step(loss, batch=batch(step, rank)))
    assert_one_decision(outcomes)
    assert_replicas(model, optimizer)
    restored = outcomes[fault].restored
    assert restored is not None
    assert 0 < restored <= fault - 2  # a pass in parts is not bit-identical, which ends a replay too
    assert all(outcome.stepped for outcome in outcomes[fault + 1 :])


def loaders(mode: str) -> None:
    """Of other lengths on each rank, with accumulation: all ranks use as many batches, a short group at the end."""
    rank, group = dist.get_rank(), int(mode)
    for shortest in (4 * group, 3 * group + 1, 3 * group - 1, group):
        model, net, optimizer = made()
        guard = steadystep.Guard(model, optimizer, config={"training": {"gradient_accumulation_steps": group}})
        used = []
        for epoch in range(2):
            loader: Any = [batch(step, rank) for step in range(shortest + 2 * rank + (group if rank else 0))]
            for x in guard.batches(iter(loader) if rank == 1 else loader):  # rank 1 does not know how many
                guard.step(closure_of(model, net), batch=x)
                used.append(epoch)
        assert used == [0] * shortest + [1] * shortest, (rank, used)
        assert (guard.epoch, guard.updates) == (2, 2 * -(-shortest // group))
        assert_replicas(model, optimizer)
        guard.close()


def slow(mode: str) -> None:
    """One rank waits at some steps, and for its data: nothing is decided by the clock, and the bits are the same."""
    found = []
    for waits in (False, True):
        model, net, optimizer = made()
        outcomes, rank = [], dist.get_rank()
        with steadystep.Guard(model, optimizer) as guard:
            for step in range(STEPS):
                if waits and rank == dist.get_world_size() - 1 and step in (0, 3, 4, STEPS - 1):
                    time.sleep(0.5)
                outcomes.append(guard.step(closure_of(model, net), batch=batch(step, rank)))
        assert_one_decision(outcomes)
        assert all(outcome.stepped and not outcome.plan.actions for outcome in outcomes)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


CHECKS: dict[str, Callable[[str], None]] = {
    "memory": memory,
    "accumulated": accumulated,
    "unused": unused,
    "hopeless": hopeless,
    "replay": replay,
    "loaders": loaders,
    "slow": slow,
}
EVERY = [f"{check} {place}" for check in ("memory", "accumulated", "unused", "hopeless", "replay") for place in PLACES]
EVERY += ["loaders 2", "loaders 3", "slow rank"]

if __name__ == "__main__":
    raise SystemExit(main(CHECKS, {}, int(sys.argv[1]), sys.argv[2:] or EVERY))
