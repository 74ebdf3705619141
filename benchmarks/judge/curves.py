"""Unguarded curves as files, to develop detectors on: step, loss, grad_norm, lr."""

from pathlib import Path
from typing import Any

import numpy

from judge.catalogue import FAULTS
from judge.jobs import Job
from judge.training import plain_run
from steadystep.faults import NO_FAULT
from steadystep.lab.tasks import TASKS


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Writes task_seed.npz, or task_fault_seed.npz; one that is there already is left alone."""
    middle = f"_{file_name(job.fault)}" if job.fault else ""
    path = folder / f"{job.task}{middle}_{job.seed}.npz"
    if path.exists():
        return {"file": path.name, "steps": 0}
    task = TASKS[job.task].make(job.seed)
    fault = FAULTS[job.fault].make(task, job.seed) if job.fault else NO_FAULT
    done = plain_run(task, num_steps=job.num_steps, fault=fault)
    folder.mkdir(parents=True, exist_ok=True)
    numpy.savez(
        path,
        step=numpy.arange(len(done.losses)),
        loss=numpy.array(done.losses),
        grad_norm=numpy.array(done.norms),
        lr=numpy.array(done.lrs),
    )
    return {"file": path.name, "steps": job.num_steps}


def file_name(fault: str) -> str:
    """Without spaces."""
    return fault.replace(" ", "-")
