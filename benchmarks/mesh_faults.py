"""Faults on each of four ranks in turn, in each kind of parallelism: no hang, one decision, the bits of a healthy run.

    python -m benchmarks.mesh_faults [--modes ddp pp] [--table]

Ranks are forked processes on gloo. A row per fault goes to benchmarks/results/mesh_faults.jsonl, and a second call runs
only what is missing; `--table` prints the table of docs/distributed.md from the rows.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import steadystep
from steadystep._utils.tensors import local_part
from tests.distributed import meshes, pipelines
from tests.distributed.forked import fork
from tests.distributed.setting import decisions, everywhere, tensors_of

OUT = Path(__file__).parent / "results" / "mesh_faults.jsonl"
RANKS = 4
MODES = {
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "hsdp": "HSDP 2 x 2",
    "submesh": "tensor parallelism, 2 of 4",
    "fsdp tp": "FSDP2 x tensor parallelism",
    "pp": "pipeline of 4 stages, 1F1B",
    "pp fsdp": "pipeline x FSDP2",
}
KINDS = {
    "nan-weight": "a weight turns NaN on one rank",
    "bit-flip": "the highest exponent bit of a weight flips on one rank",
    "nan-batch": "NaN on one rank: in its batch, in a pipeline in its activations",
    "lr-leap": "the learning rate x 1000 on all ranks, for one step",
    "lr-apart": "the learning rate x 1000 on one rank alone",
}
STEPS, FAULT = 50, 43
WAIT = 180.0
"""Seconds without an answer that count as a hang; a busy machine can take longer for one."""
CONFIG = {"recovery": {"trust_steps": 5}}


class Job:
    """A model in one mode, and how a step of it is run on this rank."""

    def __init__(self, mode: str, *, dropout: float) -> None:
        self.model: nn.Module
        self.optimizer: Optimizer
        if mode.startswith("pp"):
            pipeline = pipelines.Pipeline("deep" if mode == "pp" else "fsdp", dropout=dropout)
            self.model, self.optimizer, self.place = pipeline.model, pipeline.optimizer, pipeline.place
            self.closure: Callable[[Any], Any] = pipeline.run
            self.batch: Callable[[int], Any] = lambda step: pipelines.batch(step, self.place)
        else:
            self.model, self.optimizer, self.place = meshes.made(mode, dropout=dropout)
            self.closure = lambda x: meshes.loss_of(self.model, x)
            self.batch = lambda step: meshes.batch(step, self.place)
        torch.manual_seed(1 + (dist.get_rank() if mode.startswith("pp") else self.place))

    def spoil(self, kind: str, place: int) -> None:
        """Damage one weight of this rank."""
        weights = [p for p in self.model.parameters() if p.dim() > 1 and local_part(p).numel()]  # a shard may be empty
        held = local_part(weights[place % len(weights)]).detach().view(-1)
        with torch.no_grad():
            if kind == "nan-weight":
                held[place % held.numel()] = math.nan
            else:
                held.view(torch.int32)[place % held.numel()] ^= 1 << 30


def run(mode: str, kind: str = "", bad: int = 0) -> tuple[dict[str, Tensor], nn.Module, list[Any], str]:
    """One guarded run: what it ended with, its outcomes and the error that ended it."""
    here = dist.get_rank() == bad
    job = Job(mode, dropout=0.0 if kind == "nan-batch" or kind == "without" else 0.1)
    outcomes: list[Any] = []
    error = ""
    with steadystep.Guard(job.model, job.optimizer, config=CONFIG) as guard:
        for step in range(STEPS):
            if kind == "without" and step == FAULT:
                continue
            at = step == FAULT
            batch = job.batch(step)
            if at and here and kind in ("nan-weight", "bit-flip"):
                job.spoil(kind, bad)
            if at and here and kind == "nan-batch":
                batch = _spoilt(job, batch)
            if kind == "lr-leap" or (kind == "lr-apart" and here):
                for group in job.optimizer.param_groups:
                    group["lr"] = 10.0 if at else 1e-2
            try:
                outcomes.append(guard.step(job.closure, batch=batch))
            except steadystep.SteadystepError as raised:
                error = f"{type(raised).__name__}: {str(raised)[:60]}"
                break
            _mended(job)
    return tensors_of(job.model, job.optimizer), job.model, outcomes, error


def _spoilt(job: Job, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch * math.nan
    block = next(module for module in job.model.modules() if isinstance(module, pipelines.Block))
    vars(block.drop)["forward"] = lambda x: x * math.nan
    return batch


def _mended(job: Job) -> None:
    for module in job.model.modules():
        if isinstance(module, pipelines.Block):
            module.drop.__dict__.pop("forward", None)


def _consistent(model: nn.Module) -> bool:
    try:
        meshes.assert_consistent(model) if not _is_staged(model) else None
    except AssertionError:
        return False
    return True


def _is_staged(model: nn.Module) -> bool:
    return any(isinstance(module, pipelines.Block) for module in model.modules())


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items() if not name.endswith("calls"))


def row_of(mode: str, kind: str, bad: int, healthy: dict[str, Tensor]) -> dict[str, Any]:
    """One fault, and what became of it, agreed by all ranks."""
    ended, model, outcomes, error = run(mode, kind, bad)
    at = outcomes[FAULT] if len(outcomes) > FAULT else None
    said = everywhere((repr(decisions(outcomes)), error))
    finite = all(bool(v.isfinite().all()) for v in ended.values() if v.is_floating_point())
    rolled = [o for o in outcomes if o.restored is not None]
    return {
        "mode": mode,
        "kind": kind,
        "rank": bad,
        "hang": False,
        "one_decision": len(set(said)) == 1,
        "consistent": all(everywhere(_consistent(model))),
        "finite": all(everywhere(finite)),
        "same_bits": all(everywhere(_same(healthy, ended))),
        "rollbacks": len(rolled),
        "exact": sum(bool(o.exact) for o in rolled),
        "refused": [o.step for o in outcomes if not o.stepped and o.restored is None],
        "actions": [] if at is None else [str(action) for action in at.plan.actions],
        "noticed": next((o.step - FAULT for o in outcomes if o.plan.actions), None),
        "error": error,
    }


def rows() -> list[dict[str, Any]]:
    """Those that are there."""
    return [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []


def missing(mode: str) -> list[tuple[str, int]]:
    """Faults without a row."""
    there = {(row["mode"], row["kind"], row["rank"]) for row in rows()}
    return [(kind, rank) for kind in KINDS for rank in range(RANKS) if (mode, kind, rank) not in there]


def _write(row: dict[str, Any]) -> None:
    OUT.parent.mkdir(exist_ok=True)
    with OUT.open("a") as file:
        file.write(json.dumps(row) + "\n")


def study(mode: str) -> None:
    """All missing faults of a mode; a fault that ends the processes or leaves them waiting is a row too."""
    while todo := missing(mode):

        def work(rank: int) -> None:
            healthy = {kind: run(mode, kind)[0] for kind in ("", "without")}
            for kind, bad in todo:
                row = row_of(mode, kind, bad, healthy["without" if kind == "nan-batch" else ""])
                if rank == 0:
                    _write(row)

        begun = time.monotonic()
        if fork(RANKS, work, seconds=WAIT) and (left := missing(mode)):
            (kind, bad), taken = left[0], time.monotonic() - begun
            # a rank that died within the time that an answer may take did not leave the others waiting
            _write({"mode": mode, "kind": kind, "rank": bad, "hang": True, "died": taken < WAIT, "seconds": taken})


def table() -> str:
    """As in docs/distributed.md."""
    lines = ["| mode | faults | hangs | divergent replicas | rollbacks | replayed to the bits of a healthy run |"]
    lines += ["|---|---|---|---|---|---|"]
    every = rows()
    named = [(name, [row for row in every if row["mode"] == mode]) for mode, name in MODES.items()]
    for name, held in [*named, ("all", every)]:
        hangs = sum(row["hang"] for row in held)
        odd = sum(not (row.get("one_decision") and row.get("consistent")) for row in held if not row["hang"])
        back = [row for row in held if row.get("rollbacks")]
        lines.append(
            f"| {name} | {len(held)} | {hangs} | {odd} | {len(back)} | {sum(row['same_bits'] for row in back)} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    if not asked.table:
        for mode in asked.modes:
            study(mode)
    sys.stdout.write(table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
