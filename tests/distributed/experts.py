"""Expert and context parallelism, guarded or not. Run as a program it forks its ranks.

    experts   a mixture whose experts are a DTensor, sharded by expert over the mesh; all other parameters are plain
    own       the same as plain tensors, different ones on each rank, which DistributedDataParallel is told to ignore
    context   each rank has a part of every sequence and gathers keys and values of the others; DDP averages gradients

Arguments: number of ranks, then the names of checks ("norms experts"); without any, all.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import steadystep
from steadystep import clip
from steadystep._utils.tensors import local_part
from tests.distributed.forked import main
from tests.distributed.setting import assert_finite, assert_one_decision, assert_same, tensors_of

MODES = {2: ("experts", "own", "context")}
STEPS, FAULT, WIDTH, EXPERTS, LENGTH = 8, 12, 6, 4, 8


class Copied(torch.autograd.Function):
    """The same on all ranks; gradients of all of them are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """Parts of all ranks, added up; the gradient of the sum is that of each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Gathered(torch.autograd.Function):
    """Parts of all ranks, one after the other along the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x.contiguous())
        return torch.cat(every, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Mixture(nn.Module):
    """Every expert sees every token, weighted by a softmax: dense, so that a single process can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.bank = nn.Module()
        self.bank.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.here = slice(0, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x[:, 0]))
        weight = self.router(x).softmax(-1)
        spread = self.here != slice(0, EXPERTS)
        if spread:
            x, weight = Copied.apply(x), Copied.apply(weight)
        held = self.bank.experts.to_local() if isinstance(self.bank.experts, DTensor) else self.bank.experts
        mixed = torch.einsum("bi,eij,be->bj", x, held, weight[:, self.here])
        return Summed.apply(mixed) if spread else mixed


class Attention(nn.Module):
    """Over a whole sequence of which this rank has the queries of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if x.shape[1] < LENGTH:
            k, v = Gathered.apply(k), Gathered.apply(v)
        return x + (q @ k.mT / WIDTH**0.5).softmax(-1) @ v


def made(mode: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    size, rank = dist.get_world_size(), dist.get_rank()
    net: Any = Attention() if mode == "context" else Mixture()
    if mode != "context":
        net.here = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    if mode == "experts":
        net.bank.experts = nn.Parameter(
            distribute_tensor(net.bank.experts.detach(), init_device_mesh("cpu", (size,)), [Shard(0)])
        )
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2)
    if mode == "own":
        net.bank.experts = nn.Parameter(net.bank.experts.detach()[net.here].clone())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["bank.experts"])
    model = DistributedDataParallel(net)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(mode: str, step: int, *, whole: bool = False) -> Tensor:
    """Of a sequence each rank has a part; else all have the same."""
    x = torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if mode == "context" and not whole else x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y - (x if y.dim() == 3 else x[:, 0]).flip(-1)).square().mean()


def guarded_run(
    mode: str,
    *,
    spoil: Callable[[int, nn.Module, Tensor], Tensor] | None = None,
    factor: Callable[[int], float] = lambda _: 1.0,
    steps: int = STEPS,
    **settings: Any,
) -> tuple[nn.Module, Optimizer, list[steadystep.Outcome]]:
    """`spoil` changes the batch of a step, `factor` its loss."""
    model, optimizer = made(mode)
    outcomes = []
    with steadystep.Guard(model, optimizer, **settings) as guard:
        for step in range(steps):
            x = batch(mode, step)
            x = x if spoil is None else spoil(step, model, x)
            by = factor(step)
            outcomes.append(guard.step(lambda x, by=by: loss_of(model, x) * by, batch=x))
    return model, optimizer, outcomes


def healthy(mode: str) -> None:
    """Bit-identical to the same engine without a guard, over the steps at which replicas are compared."""
    plain, slots = made(mode)
    for step in range(24):
        loss_of(plain, batch(mode, step)).backward()
        slots.step()
        slots.zero_grad()
    model, optimizer, outcomes = guarded_run(mode, steps=24)
    assert [o.plan.actions for o in outcomes if o.plan.actions] == []
    assert_same(tensors_of(plain, slots), tensors_of(model, optimizer))
    assert_one_decision(outcomes)


def norms(mode: str) -> None:
    """Those of one process that has all experts or the whole sequence."""
    torch.manual_seed(0)
    whole: nn.Module = Attention() if mode == "context" else Mixture()
    loss_of(whole, batch(mode, 0, whole=True)).backward()
    expected = {name: float(p.grad.norm()) for name, p in whole.named_parameters()}
    total = math.hypot(*expected.values())
    _, _, outcomes = guarded_run(mode, steps=1)
    signals = outcomes[0].signals
    assert signals is not None
    assert math.isclose(signals.grad_norm, total, rel_tol=1e-6), (mode, signals, expected)
    for name, norm in zip(signals.names, signals.norms, strict=True):
        assert math.isclose(norm, expected[name], rel_tol=1e-5, abs_tol=1e-7), (mode, name, norm, expected[name])
    if mode != "own":  # the standalone function knows DTensors; of plain tensors it cannot tell that they differ
        model, _ = made(mode)
        loss_of(model, batch(mode, 0)).backward()
        assert math.isclose(clip.clip_global_norm_(model.parameters(), math.inf).norm_before, total, rel_tol=1e-6)


def nan(mode: str) -> None:
    """In the batch or the loss of each rank in turn: refused on all, and nobody goes back through the model alone."""
    ranks = range(dist.get_world_size())

    def factor(step: int) -> float:
        return math.nan if step == 2 + dist.get_rank() else 1.0

    def spoil(step: int, _: nn.Module, x: Tensor) -> Tensor:
        return x * math.nan if step == 2 + dist.get_rank() else x

    for fault in ({"spoil": spoil}, {"factor": factor}):
        model, optimizer, outcomes = guarded_run(mode, **fault)
        assert [o.step for o in outcomes if not o.stepped] == [2 + rank for rank in ranks], mode
        assert_one_decision(outcomes)
        assert_finite(model, optimizer)


def replay(mode: str) -> None:
    """A weight turns NaN on the last rank: all roll back, replay every update and end where a healthy run does."""

    def spoil(step: int, model: nn.Module, x: Tensor) -> Tensor:
        if step == FAULT and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                local_part(list(model.parameters())[-1]).view(-1)[0] = math.nan
        return x

    settings = {"config": {"recovery": {"trust_steps": 4}}, "steps": FAULT + 4}
    whole, slots, _ = guarded_run(mode, **settings)
    model, optimizer, outcomes = guarded_run(mode, spoil=spoil, **settings)
    back = outcomes[FAULT]
    assert (back.restored, back.exact) == (FAULT + 1, True), (back.restored, back.replayed, back.exact, back.plan)
    assert_one_decision(outcomes)
    assert_same(tensors_of(whole, slots), tensors_of(model, optimizer))


CHECKS = {"healthy": healthy, "norms": norms, "nan": nan, "replay": replay}

if __name__ == "__main__":
    sys.exit(main(CHECKS, MODES, int(sys.argv[1]), sys.argv[2:]))
