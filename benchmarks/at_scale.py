"""What a guard costs on many ranks: messages, bytes and time under a network model, snapshots per rank, the run log.

    python -m benchmarks.at_scale [--log]

Nothing is measured on a cluster. Payloads are encoded and snapshots placed by the library's own code; times follow the
alpha-beta model (a message of B bytes takes alpha + B * beta). `--log` trains a small model and weighs its run log.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import steadystep
from steadystep.config import Config
from steadystep.parallel.payload import PayloadLayout, encode
from steadystep.records import Signals
from steadystep.snapshots.placement import interval_mult, place

ALPHA_S = 10e-6
"""Latency of a message between two hosts."""
BETA_S = 1 / 25e9
"""Seconds per byte: a link of 25 GB/s."""
RANKS = (8, 64, 1000)
PER_HOST = 8
HOST_GB = (2000, 256)
STATE_BYTES = 12
"""Per parameter: weight and two moments of AdamW in fp32."""


@dataclass(frozen=True, slots=True)
class Job:
    """A transformer of `blocks` with 9 tensors each, and 3 others."""

    name: str
    parameters: float
    blocks: int

    @property
    def tensors(self) -> int:
        """Parameters, counted as tensors."""
        return 9 * self.blocks + 3


JOBS = (Job("1B", 1e9, 24), Job("70B", 70e9, 80))


def payload_bytes(tensors: int, ranks: int, *, stages: bool = False) -> int:
    """Of the one all-reduce of a step, as the library encodes it."""
    names = tuple(map(str, range(tensors)))
    form = PayloadLayout(rank=0, size=ranks, names=names, buffers=(), micro_batches=1, questions=7, pipelined=stages)
    seen = Signals(step=0, loss=1.0, losses=(1.0,), grad_norm=1.0, lr=1e-3, names=names, norms=(1.0,) * tensors)
    return 8 * len(encode(form, seen, copies=dict.fromkeys(names, 1.0), questions=[False] * 7))


def ring(size: int, ranks: int) -> tuple[int, float]:
    """Messages that a rank sends and seconds, for an all-reduce of `size` bytes: reduce-scatter, then all-gather."""
    steps = 2 * (ranks - 1)
    return steps, steps * (ALPHA_S + size / ranks * BETA_S)


def tree(size: int, ranks: int) -> tuple[int, float]:
    """The same along a binary tree, up and down."""
    steps = 2 * math.ceil(math.log2(ranks))
    return steps, steps * (ALPHA_S + size * BETA_S)


def messages() -> list[str]:
    """A table: what a step sends."""
    lines = [
        "| job | ranks | payload, bytes | in a pipeline | messages, ring | time, ring | messages, tree | time, tree |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for job in JOBS:
        for ranks in RANKS:
            size, staged = payload_bytes(job.tensors, ranks), payload_bytes(job.tensors, ranks, stages=True)
            (hops, slow), (levels, fast) = ring(size, ranks), tree(size, ranks)
            times = f"{hops:,} | {1e3 * slow:.2f} ms | {levels} | {1e3 * fast:.2f} ms"
            lines.append(f"| {job.name} | {ranks:,} | {size:,} | {staged:,} | {times} |")
    return lines


def snapshots() -> list[str]:
    """A table: what a rank keeps for rollbacks, by default."""
    lines = ["| job | ranks | memory of a host | a snapshot, per rank | in memory | on disk | one every |"]
    lines += ["|---|---|---|---|---|---|---|"]
    settings = Config().recovery
    cases = [(JOBS[0], "DDP", 1, 8), *((job, "FSDP2", ranks, ranks) for job in JOBS for ranks in (64, 1000))]
    for job, kind, shards, ranks in cases:
        for host in HOST_GB:
            size = STATE_BYTES * job.parameters / shards
            memory = 0.25 * host * 1e9 / PER_HOST
            compact = size * 8 / STATE_BYTES  # moments in bf16
            placed = place(size=size, compact_size=compact, count=settings.snapshots, memory=memory, disk=math.inf)
            every = settings.trust_steps * interval_mult(size, placed.count)
            held = f"{placed.in_memory} | {placed.on_disk} | {every} steps"
            lines.append(f"| {job.name} | {ranks:,}, {kind} | {host:,} GB | {size / 1e9:.2f} GB | {held} |")
    return lines


def run_log(steps: int = 100) -> list[str]:
    """A table: what rank 0 writes."""
    lines = ["| job | run log per step | per million steps |", "|---|---|---|"]
    for job in JOBS:
        model = nn.Module()
        for i in range(job.tensors):
            model.register_parameter(f"blocks_{i // 9}_weight_{i % 9}", nn.Parameter(torch.ones(2)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with tempfile.TemporaryDirectory() as folder:
            with steadystep.Guard(model, optimizer, run_dir=folder) as guard:
                for _ in range(steps):
                    guard.step(lambda held=model: torch.cat(list(held.parameters())).square().sum())
            size = sum(path.stat().st_size for path in Path(folder).glob("run.jsonl*"))
        lines.append(f"| {job.name} | {size / steps / 1e3:.1f} kB | {size / steps / 1e3:.1f} GB |")
    return lines


def main() -> int:
    """Print the tables of docs/at_scale.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", action="store_true", help="weigh the run log too")
    tables = [messages(), snapshots(), *([run_log()] if parser.parse_args().log else [])]
    sys.stdout.write("\n\n".join("\n".join(table) for table in tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
