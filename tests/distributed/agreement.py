"""What every rank must do alike under a guard, on any number of ranks."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import steadystep
from steadystep._utils.tensors import local_part
from steadystep.records import Finding, Signals
from tests.distributed.setting import (
    STEPS,
    assert_finite,
    assert_one_decision,
    assert_replicas,
    assert_same,
    batch,
    guarded_run,
    made,
    nan_on,
    plain_net,
    plain_run,
    squared,
    tensors_of,
)


class Says:
    """Claims damaged weights at one step."""

    name = "weight-jump"

    def __init__(self, at: int) -> None:
        self._at = at

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        if signals.step != self._at:
            return ()
        numbers = {"value": 9e9, "limit": 9e9, "baseline": 9e9}
        return (Finding(detector=self.name, step=self._at, severity="act", since=self._at, **numbers),)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def healthy_is_untouched(kind: str) -> None:
    for max_norm in (None, 0.5):
        plain = plain_run(kind, max_norm=max_norm)
        model, optimizer, outcomes, guard = guarded_run(kind, config={"training": {"max_grad_norm": max_norm}})
        assert guard.updates == STEPS
        assert_same(tensors_of(*plain), tensors_of(model, optimizer))
        assert_one_decision(outcomes)
        signals = outcomes[3].signals
        assert signals is not None
        assert signals.names[0] == "0.weight"  # as the owner knows it
        assert signals.inputs is not None
        assert [o.step for o in outcomes if o.signals and o.signals.probe] == [3, 4, 6, 10]  # taken at 1, 2, 4 and 8
        guard.close()


def norms_are_those_of_the_whole(kind: str) -> None:
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer)
    x = batch(0, dist.get_rank())
    squared(model, x).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    expected = {n.removeprefix("module."): g.norm().item() for n, g in whole.items()}
    optimizer.zero_grad()
    signals = guard.step(lambda x: squared(model, x), batch=x).signals
    assert signals is not None
    assert set(signals.names) == set(expected)
    for name, norm in zip(signals.names, signals.norms, strict=True):
        assert math.isclose(norm, expected[name], rel_tol=1e-5, abs_tol=1e-6), (name, norm, expected[name])
    assert math.isclose(signals.grad_norm, math.hypot(*expected.values()), rel_tol=1e-5)
    guard.close()


def one_ranks_nan(kind: str) -> None:
    bad = dist.get_world_size() - 1
    model, optimizer, outcomes, guard = guarded_run(kind, bad=nan_on(bad, 4, 7))
    assert [o.step for o in outcomes if not o.stepped] == [4, 7]
    assert_one_decision(outcomes)
    assert_finite(model, optimizer)
    if kind == "ddp":
        assert_replicas(model, optimizer)
    refused = outcomes[4]
    assert refused.signals is not None
    assert refused.signals.bad_ranks == (bad,)
    assert refused.diagnosis.cause == "non-finite-input"
    assert f"on rank {bad}" in refused.diagnosis.evidence
    assert refused.origin.startswith(f"rank {bad}:"), refused.origin
    clean = guarded_run(kind)[2][-1].loss
    assert outcomes[-1].loss < 1.5 * clean, (outcomes[-1].loss, clean)
    guard.close()


def going_back(kind: str) -> None:
    """Weights damaged on every rank; all go back to the same state at once, and replay every update since."""
    model, optimizer = made(kind)
    config = {
        "training": {"stability_monitoring": False},
        "recovery": {"trust_steps": 4},
    }
    guard = steadystep.Guard(model, optimizer, config=config, detectors=[Says(at=30)])
    outcomes = []
    for step in range(36):
        if step == 30:
            with torch.no_grad():
                local_part(list(model.parameters())[-2]).mul_(30.0)
        x = batch(step, dist.get_rank())
        outcomes.append(guard.step(lambda x: squared(model, x), batch=x))
    assert_one_decision(outcomes)
    assert (outcomes[30].restored, outcomes[30].exact) == (31, True)
    assert all(o.stepped for o in outcomes[31:])
    healthy, slots, _, other = guarded_run(kind, steps=36, config=config)
    assert_same(tensors_of(healthy, slots), tensors_of(model, optimizer))
    other.close()
    if kind == "ddp":
        assert_replicas(model, optimizer)
    guard.close()


def a_micro_batch_is_left_out_everywhere(kind: str) -> None:
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer, config={"training": {"gradient_accumulation_steps": 3}})
    outcomes = []
    for step in range(12):
        x = batch(step, dist.get_rank())
        x = x * math.nan if (step, dist.get_rank()) == (4, 0) else x
        outcome = guard.step(lambda x: squared(model, x), batch=x)
        outcomes += [] if outcome.pending else [outcome]
    assert [o.left_out for o in outcomes] == [(), (1,), (), ()]
    assert_one_decision(outcomes)
    assert_finite(model, optimizer)
    if kind == "ddp":
        assert_replicas(model, optimizer)
    guard.close()


def a_flipped_bit_is_found(kind: str) -> None:
    """On one rank, in one weight: the run goes back to where all ranks had the same, and replays what followed."""
    if kind == "fsdp":
        return  # there are no copies
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"trust_steps": 4}})
    outcomes = []
    for step in range(44):
        if step == 30 and dist.get_rank() == 1:
            with torch.no_grad():
                bits = model.module[0].weight.view(-1).view(torch.int32)
                bits[0] = int(bits[0]) ^ 1
        x = batch(step, dist.get_rank())
        outcomes.append(guard.step(lambda x: squared(model, x), batch=x))
    assert_one_decision(outcomes)
    found = [o.step for o in outcomes if any(f.detector == "odd-replica" for f in o.findings)]
    assert found == [40]
    back = outcomes[40]
    assert back.diagnosis.cause == "odd-replica"
    assert "0.weight" in back.diagnosis.evidence
    assert back.restored == 41
    assert back.replayed > 20
    assert_replicas(model, optimizer)
    healthy, slots, _, other = guarded_run(kind, steps=44, config={"recovery": {"trust_steps": 4}})
    assert_same(tensors_of(healthy, slots), tensors_of(model, optimizer))
    other.close()
    guard.close()


def a_spoilt_state_is_put_back(kind: str) -> None:
    """A moment on one rank, then averaged weights that one rank alone keeps: found at the next look, by all."""
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"trust_steps": 4}})
    rank, average = dist.get_rank(), nn.Linear(2, 2)
    if rank == 0:
        guard.keep("average", average)
    outcomes, first = [], next(iter(model.parameters()))
    for step in range(50):
        with torch.no_grad():
            if step == 27 and rank == 1:
                local_part(optimizer.state[first]["exp_avg"]).view(-1)[0] = math.nan
            if step == 45 and rank == 0:
                average.weight[0, 0] = 1e38
        x = batch(step, rank)
        outcomes.append(guard.step(lambda x: squared(model, x), batch=x))
    assert_one_decision(outcomes)
    acted = [(o.step, o.plan.actions, o.stepped) for o in outcomes if o.plan.actions]
    assert acted == [(27, ("restore-moments",), True), (47, ("restore-kept",), True)], acted
    assert outcomes[27].findings[0].where == ("exp_avg of 0.weight",)
    assert float(average.weight.detach().abs().max()) < 1.0
    assert_finite(model, optimizer)
    if kind == "ddp":
        assert_replicas(model, optimizer)
    guard.close()


def loaders_end_together(kind: str) -> None:
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer)
    rank = dist.get_rank()
    for _ in range(2):
        loader = [batch(step, rank) for step in range(5 + 2 * rank)]
        for x in guard.batches(loader):
            guard.step(lambda x: squared(model, x), batch=x)
    assert (guard.attempts, guard.epoch) == (10, 2)
    guard.close()


def one_collective_a_step(kind: str) -> None:
    """Counted by the profiler, which sees those of the framework too."""

    def counted(work: Callable[[], object]) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            work()
        return Counter(e.name for e in seen.events() if e.name.startswith("gloo:") or e.name.startswith("c10d::"))

    steps = 3
    plain = counted(lambda: plain_run(kind, steps=steps))
    ours = counted(lambda: guarded_run(kind, steps=steps, config={"mode": "careful"}))
    more = ours - plain
    expected = {"gloo:all_reduce": steps, "gloo:all_gather": 1}  # once, when the guard is made: what it was given
    assert {name: count for name, count in more.items() if name.startswith("gloo:")} == expected, more
    assert not plain - ours


def _accumulated(model: nn.Module, optimizer: Optimizer, *, micro: int, count: int) -> None:
    """As torch's documentation writes it: DistributedDataParallel is told which backward pass is the last one."""
    for step in range(count):
        last = step % micro == micro - 1
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            (squared(model, batch(step, dist.get_rank())) / micro).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def one_all_reduce_per_update(kind: str) -> None:
    """With accumulation the gradients are sent once, and the weights are those of the loop that does so by hand."""
    micro, updates = 4, 3

    def sent(work: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            work()
        return sum(e.name == "gloo:all_reduce" for e in seen.events())

    plain, ours = made(kind), made(kind)
    config = {"mode": "careful", "training": {"gradient_accumulation_steps": micro}}
    guard = steadystep.Guard(*ours, config=config)

    def guarded() -> None:
        for step in range(micro * updates):
            guard.step(lambda x: squared(ours[0], x), batch=batch(step, dist.get_rank()))

    by_hand = sent(lambda: _accumulated(*plain, micro=micro, count=micro * updates))
    assert sent(guarded) == by_hand + updates  # one agreement for each
    assert_same(tensors_of(*plain), tensors_of(*ours))
    guard.close()


def a_short_group_is_averaged_too(kind: str) -> None:
    """Two of three micro-batches and the end of an epoch: the update is that of the mean over both and all ranks."""
    whole, short = made(kind, plain_net), made(kind, plain_net)
    full = steadystep.Guard(*whole, config={"training": {"gradient_accumulation_steps": 2}})
    guard = steadystep.Guard(*short, config={"training": {"gradient_accumulation_steps": 3}})
    for step in range(2):
        x = batch(step, dist.get_rank())
        full.step(lambda x: squared(whole[0], x), batch=x)
        assert guard.step(lambda x: squared(short[0], x), batch=x).pending
    outcome = guard.flush()
    assert outcome is not None
    assert outcome.stepped
    for left, right in zip(whole[0].parameters(), short[0].parameters(), strict=True):
        torch.testing.assert_close(local_part(left).detach(), local_part(right).detach(), rtol=1e-4, atol=1e-6)
    if kind == "ddp":
        assert_replicas(*short)
    for each in (full, guard):
        each.close()


def numbers_of_the_user(kind: str) -> None:
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer)
    rank, x = dist.get_rank(), batch(0, dist.get_rank())
    mean = (dist.get_world_size() - 1) / 2
    outcome = guard.step(lambda x: squared(model, x), batch=x, metrics={"kl": float(rank)})
    assert outcome.signals is not None
    assert outcome.signals.metrics == {"kl": mean}
    outcome = guard.step(lambda x: squared(model, x), batch=x, metrics={"kl": 1.0} if rank == 0 else None)
    assert outcome.signals is not None
    assert outcome.signals.metrics == {}
    optimizer.param_groups[0]["lr"] = 0.01 * (rank + 1)
    with pytest.raises(steadystep.MisuseError, match="differ between ranks"):
        guard.step(lambda x: squared(model, x), batch=x)
    guard.close()


BRIEFLY = {
    "nan": one_ranks_nan,
    "left out": a_micro_batch_is_left_out_everywhere,
    "collectives": one_collective_a_step,
}
ALL = BRIEFLY | {
    "healthy": healthy_is_untouched,
    "norms": norms_are_those_of_the_whole,
    "back": going_back,
    "loaders": loaders_end_together,
    "flipped bit": a_flipped_bit_is_found,
    "spoilt state": a_spoilt_state_is_put_back,
    "numbers": numbers_of_the_user,
    "accumulated": one_all_reduce_per_update,
    "short group": a_short_group_is_averaged_too,
}
