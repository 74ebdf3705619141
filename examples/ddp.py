"""DistributedDataParallel with a guard: one rank gets a NaN, and all ranks skip that step together.

torchrun --nproc-per-node 2 examples/ddp.py      # python examples/ddp.py does the same
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import steadystep

STEPS, BAD_STEP, BAD_RANK = 200, 60, 1


def main() -> None:
    """Train on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" on GPUs
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    guard = steadystep.Guard(model, optimizer)  # finds the other ranks by itself

    data = torch.Generator().manual_seed(rank)  # different batches on every rank
    refused = []
    for step in range(STEPS):
        x = torch.randn(32, 8, generator=data)
        y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
        if (step, rank) == (BAD_STEP, BAD_RANK):
            x[0, 0] = float("nan")
        outcome = guard.step(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]), batch=(x, y))
        if not outcome.stepped:
            refused.append(step)

    total = sum(p.detach().double().sum() for p in model.parameters())
    sums = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, total)
    if rank == 0:
        same = all(torch.equal(each, sums[0]) for each in sums)
        sys.stdout.write(f"{dist.get_world_size()} ranks, refused {refused}, loss {outcome.loss:.3f}, same: {same}\n")
        assert refused == [BAD_STEP]
        assert same
    guard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        sys.exit(subprocess.run(launch, check=False).returncode)
