"""What differs between ranks by nature: counts of tokens, a closure that fails on one of them, who reaches the end."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import steadystep
from steadystep._utils.tensors import local_part
from steadystep.checkpoints.shared_store import SharedCheckpointStore
from steadystep.incidents.bundle import read_bundle
from tests.distributed.agreement import Says
from tests.distributed.setting import (
    assert_one_decision,
    assert_replicas,
    batch,
    everywhere,
    made,
    plain_net,
    squared,
)


def tokens(micro: int, rank: int) -> float:
    """Other numbers on each rank, new largest ones on the way, and none at all on one rank."""
    return 0.0 if (micro, rank) == (3, 1) else float((7 * micro + 5 * rank) % 11 + 1)


def counts_of_tokens(kind: str) -> None:
    for size in (1, 2):
        _counted(kind, size)


def _counted(kind: str, size: int) -> None:
    """The update is that of one process which has all micro-batches of all ranks."""
    model, optimizer = made(kind, plain_net)
    guard = steadystep.Guard(model, optimizer, config={"training": {"gradient_accumulation_steps": size}})
    alone = plain_net()
    other = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for first in range(0, 8, size):
        total, count = torch.zeros(()), 0.0
        for micro in range(first, first + size):
            rank, x = dist.get_rank(), batch(micro, dist.get_rank())
            guard.step(lambda x: squared(model, x), batch=x, weight=tokens(micro, rank))
            for each in range(dist.get_world_size()):
                total = total + tokens(micro, each) * squared(alone, batch(micro, each))
                count += tokens(micro, each)
        other.zero_grad()
        (total / count).backward()
        other.step()
    assert guard.updates == 8 // size
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(whole.detach(), theirs.detach(), rtol=1e-3, atol=1e-5)
    if kind == "ddp":
        assert_replicas(model, optimizer)
    remembered = everywhere(guard.state_dict()["accumulation"])
    assert all(each == remembered[0] for each in remembered), remembered
    guard.close()


def one_ranks_evaluation_of_several(kind: str) -> None:
    """LBFGS: infinity on one rank in its second evaluation ends the step on all of them."""
    if kind == "fsdp":
        return
    model = DistributedDataParallel(plain_net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    outcomes: list[Any] = []
    with steadystep.watch(model, optimizer) as watcher:
        for step in range(3):
            calls, x = [0], batch(step, dist.get_rank())

            def closure(step: int = step, calls: list[int] = calls, x: Tensor = x) -> Tensor:
                calls[0] += 1
                optimizer.zero_grad()
                loss = squared(model, x)
                bad = step == 1 and calls[0] == 2 and dist.get_rank() == 1
                loss = loss + math.inf if bad else loss
                loss.backward()
                return loss

            optimizer.step(closure)
            outcomes.append(watcher.outcome)
    assert [o.stepped for o in outcomes] == [True, False, True]
    assert_one_decision(outcomes)
    weights = everywhere([p.tolist() for p in model.parameters()])
    assert all(each == weights[0] for each in weights)


def an_end_that_was_agreed_is_over(kind: str) -> None:
    """The first batch of the next pass is left out by the loop: that pass goes on."""
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer)
    used = []
    for epoch in range(3):
        for number, x in enumerate(guard.batches([batch(step, dist.get_rank()) for step in range(4)])):
            if epoch and not number:
                continue
            guard.step(lambda x: squared(model, x), batch=x)
            used.append((epoch, number))
            if (epoch, number) == (1, 3):
                break
    assert used == [(0, 0), (0, 1), (0, 2), (0, 3), *((e, n) for e in (1, 2) for n in (1, 2, 3))]
    guard.close()


def kept_by_one_rank(kind: str) -> None:
    """What outdates the states of one rank: all drop theirs together, and go on to choose the same ones."""
    for watches in (False, True):
        model, optimizer = made(kind)
        given = {"config": {"recovery": {"trust_steps": 4}}, "detectors": [Says(at=36)]}
        watcher = steadystep.watch(model, optimizer, **given) if watches else None
        guard = watcher.guard if watcher is not None else steadystep.Guard(model, optimizer, **given)
        rank, average, outcomes = dist.get_rank(), nn.Linear(2, 2), []
        for step in range(50):
            x = batch(step, rank)
            if step == 0 and rank == 0:
                local_part(next(iter(model.parameters()))).detach().mul_(1.0)  # touched after watch()
            if step in (3, 25) and rank == 0:
                guard.keep(f"average {step}", average)
            if step == 46 and rank == 0:
                average.weight.data.fill_(math.nan)
            if watcher is None:
                outcomes.append(guard.step(lambda x, model=model: squared(model, x), batch=x))
            else:
                optimizer.zero_grad()
                squared(model, x).backward()
                optimizer.step()
                outcomes.append(watcher.outcome)
            held = everywhere([state.step for state in guard._recovery.states])
            assert all(each == held[0] for each in held), (step, held)
        assert_one_decision(outcomes)
        acted = [(o.step, o.plan.actions[0]) for o in outcomes if o.plan.actions]
        assert acted == [(36, "rollback"), (47, "restore-kept")], acted
        assert bool(average.weight.isfinite().all())
        if kind == "ddp":
            assert_replicas(model, optimizer)
        guard.close() if watcher is None else watcher.remove()


def edited_on_one_rank(kind: str) -> None:
    """Announced by one, against the rules, so states are of different steps: an error on all when they are needed."""
    if kind == "fsdp":
        return  # a weight that is spread over the ranks is measured by all of them
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer)
    first = next(iter(model.parameters()))
    for step in range(28):
        if step == 25:
            with guard.editing() if dist.get_rank() == 0 else nullcontext():
                first.detach().mul_(1.01)
        if step == 27:
            optimizer.state[first]["exp_avg"].fill_(math.nan)
        with pytest.raises(steadystep.MisuseError, match="different steps") if step == 27 else nullcontext():
            guard.step(lambda x: squared(model, x), batch=batch(step, dist.get_rank()))
    guard.close()


def a_save_that_fails_on_the_first_rank(kind: str, folder: Path) -> None:
    """All ranks hear of it, and none waits."""
    model, optimizer = made(kind)
    guard = steadystep.Guard(model, optimizer)
    plain = SharedCheckpointStore.put

    def refused(self: SharedCheckpointStore, *args: Any, **kwargs: Any) -> Path:
        if dist.get_rank() == 0:
            raise steadystep.CheckpointError("the disk is full")
        return plain(self, *args, **kwargs)

    SharedCheckpointStore.put = refused  # type: ignore[method-assign]
    try:
        with pytest.raises(
            steadystep.CheckpointError, match="disk is full" if dist.get_rank() == 0 else "another rank"
        ):
            guard.save(folder / f"{kind}-full")
    finally:
        SharedCheckpointStore.put = plain  # type: ignore[method-assign]
    guard.close()


ALL = {
    "tokens": counts_of_tokens,
    "evaluations": one_ranks_evaluation_of_several,
    "end": an_end_that_was_agreed_is_over,
    "kept by one": kept_by_one_rank,
    "edited on one": edited_on_one_rank,
}


class Length(nn.Module):
    """The length of each row; at zero its gradient is NaN."""

    share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.share).square().sum(-1, keepdim=True).sqrt()


def with_a_length() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), Length(), nn.Linear(1, 1))


def a_nan_of_one_ranks_backward_pass(kind: str, folder: Path) -> None:
    """Loss and inputs are finite everywhere: the module is named, on its rank, and the bundle holds whole weights."""
    model, optimizer = made(kind, with_a_length)
    guard = steadystep.Guard(model, optimizer, run_dir=folder / f"{kind}-backward")
    length = next(module for module in model.modules() if isinstance(module, Length))
    for step in range(5):
        length.share = 0.0 if (step, dist.get_rank()) == (3, 1) else 1.0
        outcome = guard.step(lambda x: squared(model, x), batch=batch(step, dist.get_rank()))
        assert outcome.stepped == (step != 3)
        refused = outcome if step == 3 else None
        if refused is not None:
            assert refused.origin.startswith("rank 1: 1 (Length), backward:"), refused.origin
            assert "SqrtBackward" in refused.origin
            weights = {n.removeprefix("module."): p for n, p in model.named_parameters()}
            whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in weights.items()}
            kept = read_bundle(Path(refused.incident)).state
            assert kept is not None
            assert kept["parameters"].keys() == whole.keys()
            assert all(torch.equal(kept["parameters"][n], whole[n].detach()) for n in whole)
            moments = [slots["exp_avg"] for slots in kept["optimizer"]["state"].values()]
            assert [m.shape for m in moments] == [w.shape for w in whole.values()]
    guard.close()


SAVE = {"backward": a_nan_of_one_ranks_backward_pass, "full disk": a_save_that_fails_on_the_first_rank}
