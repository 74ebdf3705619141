"""Run by torchrun on two ranks: a bit that flips on one is named and put back, and all compute the step again."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import steadystep
from steadystep.records import Outcome
from steadystep.signals import checksums

STEPS, AT = 8, (3, 5)


def flip(tensor: Tensor, *, bit: int) -> None:
    """As memory does it: torch is not told."""
    flat = tensor.data.view(-1).view(torch.int32)
    flat[7] ^= 1 << bit


def run(checks: str, where: str = "", *, mode: str = "autopilot") -> tuple[Tensor, list[Outcome]]:
    """Weights and moments at the end, and the outcomes; flips on rank 1, inside the closure or between two steps."""
    torch.manual_seed(0)
    first = [nn.Linear(6, 100), nn.BatchNorm1d(100), nn.Dropout(0.2)]
    model = nn.Sequential(*first, nn.Linear(100, 100), nn.Linear(100, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = Path(os.environ["FOLDER"]) / f"run-{checks}-{where}-{mode}"
    config = {"mode": mode, "monitoring": {"corruption_checks": checks}}
    guard = steadystep.Guard(wrapped, optimizer, config=config, run_dir=folder)
    data, outcomes = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(STEPS):
        x = torch.randn(8, 6, generator=data)
        todo = [where and step in AT and dist.get_rank() == 1]

        def hit(step: int = step) -> None:
            flip(model[3].weight if step == AT[0] else optimizer.state[model[3].weight]["exp_avg"], bit=12)

        def loss(x: Tensor = x, todo: list[bool] = todo) -> Tensor:
            value = wrapped(x).square().mean()
            if where == "inside" and todo and todo.pop():
                hit()
            return value

        if where == "between" and todo.pop():
            hit()
        outcomes.append(guard.step(loss))
    guard.close()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return torch.cat([each.detach().flatten() for each in (*model.parameters(), *moments)]), outcomes


def flips(outcomes: list[Outcome]) -> dict[int, list[object]]:
    return {o.step: [(f.tensor, f.index, f.bit, f.repaired, f.rank) for f in o.signals.bit_flips] for o in outcomes}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plain, _ = run("off")
    checked, outcomes = run("full")
    assert torch.equal(plain, checked)
    assert not any(outcome.findings for outcome in outcomes)
    for where in ("between", "inside"):
        mended, outcomes = run("full", where)
        assert torch.equal(plain, mended), where
        found = flips(outcomes)
        assert found[AT[0]] == [("3.weight", 7, 12, True, 1)], found
        assert found[AT[1]] == [("exp_avg of 3.weight", 7, 12, True, 1)], found
        assert not any(found[step] for step in found if step not in AT)
        assert all(outcome.stepped for outcome in outcomes)
        assert "on rank 1" in outcomes[AT[0]].diagnosis.evidence
    checksums.MemoryChange.restore = lambda self, memory: None  # type: ignore[method-assign]
    located = checksums.MemoryChange.bits

    def lost(self: checksums.MemoryChange, tensor: Tensor) -> list[tuple[int, int]]:
        self.located = False
        return located(self, tensor)

    checksums.MemoryChange.bits = lost  # type: ignore[method-assign]
    copied, outcomes = run("full", "between")
    assert outcomes[AT[0]].plan.actions == ("copy-replica", "skip-step"), outcomes[AT[0]].plan
    every = [torch.empty_like(copied) for _ in range(2)]
    dist.all_gather(every, copied)
    assert torch.equal(*every)
    sys.stdout.write(f"rank {dist.get_rank()}: ok\n")
    dist.destroy_process_group()
