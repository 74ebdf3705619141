"""One run: plain or guarded, healthy or with a fault, and what is worth knowing about it afterwards."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

import steadystep
from steadystep.errors import TrainingHalted
from steadystep.faults import NO_FAULT, Fault
from steadystep.lab.tasks import Task
from steadystep.records import Outcome

LOUD = ("warn", "act", "critical")


@final
@dataclass(slots=True, kw_only=True)
class Run:
    """What a run left behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    held_out: float = math.nan
    final_lr: float = math.nan
    """What the optimizer says once the run is over."""
    weights: str = ""
    """A digest of all parameters and buffers."""
    updates: int = 0
    halted: str = ""
    findings: list[tuple[int, str, str, str]] = field(default_factory=list)
    """(step, detector, severity, what)."""
    plans: list[tuple[int, tuple[str, ...], str]] = field(default_factory=list)
    """(step, what was done, the cause that was named), for each step that was not simply taken."""

    causes: Counter[str] = field(default_factory=Counter)
    """How often each cause was named where a finding was loud or something was done."""


def plain_run(task: Task, *, num_steps: int, fault: Fault = NO_FAULT, without: Container[int] = ()) -> Run:
    """The loop as anybody writes it; batches at the steps `without` are drawn and not used."""
    run = Run()
    params = [p for group in task.optimizer.param_groups for p in group["params"]]
    for step in range(num_steps):
        batch = fault.batch(step, task.batch())
        if step in without:
            continue
        with fault.at(step):
            task.optimizer.zero_grad()
            loss = fault.loss(step, task.loss(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            run.losses.append(loss.item())
            run.norms.append(norm.item())
            run.lrs.append(float(task.optimizer.param_groups[0]["lr"]))
            task.optimizer.step()
        task.after_step()
        run.updates += 1
    return _finished(run, task)


def guarded_run(
    task: Task,
    *,
    num_steps: int,
    fault: Fault = NO_FAULT,
    after: Callable[[int], None] = lambda _: None,
) -> Run:
    """The same loop with a guard as it comes out of the box; `after` is called with every step that was done."""
    run = Run()
    guard = steadystep.Guard(task.model, task.optimizer)
    try:
        for step in range(num_steps):
            batch = fault.batch(step, task.batch())
            with fault.at(step):
                outcome = guard.step(_closure(task, fault, step), batch=batch)
            _note(run, step, outcome)
            task.after_step()
            after(step)
    except TrainingHalted as halt:
        run.halted = f"{halt.step}: {halt.what}; {halt.did}"
    finally:
        run.updates = guard.updates
        guard.close()
    return _finished(run, task)


def _closure(task: Task, fault: Fault, step: int) -> Callable[[Any], Tensor]:
    return lambda batch: fault.loss(step, task.loss(batch))


def _note(run: Run, step: int, outcome: Outcome) -> None:
    run.losses.append(outcome.loss)
    if outcome.signals is not None:
        run.norms.append(outcome.signals.grad_norm)
        run.lrs.append(outcome.signals.lr)
    run.findings += [(step, f.detector, f.severity, f.what) for f in outcome.findings]
    acted = bool(outcome.plan.steps) or not outcome.stepped
    if acted:
        run.plans.append((step, outcome.plan.steps, outcome.diagnosis.cause))
    if acted or any(f.severity in LOUD for f in outcome.findings):
        run.causes[outcome.diagnosis.cause] += 1


def _finished(run: Run, task: Task) -> Run:
    run.held_out = task.held_out()
    run.final_lr = float(task.optimizer.param_groups[0]["lr"])
    digest = hashlib.sha256()
    for tensor in task.model.state_dict().values():
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    run.weights = digest.hexdigest()
    return run
