"""Ranks as forked processes: torch is imported once for all of them. A hang is a failure."""

import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import steadystep

Checks = Mapping[str, Callable[[str], None]]


def counted(work: Callable[[], object]) -> Counter[str]:
    """The messages that `work` sends, by kind."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    return Counter(event.name for event in seen.events() if event.name.startswith("gloo:"))


def fork(size: int, work: Callable[[int], None], *, seconds: float = 60.0) -> int:
    """Run `work(rank)` on so many ranks of a gloo group, in which an answer may take so long; 0 when all went well."""
    steadystep.Guard(nn.Linear(1, 1), None).close()  # what it imports late is imported once for all ranks
    context = multiprocessing.get_context("fork")

    def one_rank(rank: int, store: str) -> None:
        torch.set_num_threads(1)
        wait = timedelta(seconds=seconds)
        dist.init_process_group("gloo", f"file://{store}", timeout=wait, rank=rank, world_size=size)
        work(rank)
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=one_rank, args=(rank, f"{folder}/store")) for rank in range(size)]
        for rank in ranks:
            rank.start()
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.join(0.1)
        failed = any(rank.exitcode for rank in ranks)
        for rank in ranks:
            if failed:
                rank.join(1.0)
                rank.kill()
            rank.join()
    return int(failed)


def main(checks: Checks, modes: Mapping[int, Sequence[str]], size: int, names: Sequence[str]) -> int:
    """The named checks ("norms tp") on so many ranks; without any, each check of each mode."""

    def work(rank: int) -> None:
        for name in names or [f"{check} {mode}" for mode in modes[size] for check in checks]:
            check, _, mode = name.partition(" ")
            checks[check](mode)
            if rank == 0:
                os.write(1, f"{name}: ok\n".encode())

    return fork(size, work)
