"""One run: a task, an arm, and perhaps a fault."""

import math
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from steadystep.faults import NO_FAULT, Fault, parse
from steadystep.faults.card.run import weights_finite
from steadystep.lab.bench.faulty.diary import Diary
from steadystep.lab.bench.faulty.trainer import Stopped, Trainer
from steadystep.lab.bench.faulty.trials import TRIALS, first_step
from steadystep.lab.tasks import TASKS, Task
from steadystep.notices import quiet_log

SCORED, EVERY = 5, 10
"""The score is the mean held-out loss at the last five tens of steps: less noise than the last one alone."""
_GRACE = 8
"""Steps that a run with NaN weights still gets, for rules that need several."""


def run(
    make: Callable[[Task], Trainer],
    *,
    task: str,
    seed: int,
    num_steps: int,
    trial: str = "",
    without: Container[int] = (),
    curve: bool = False,
) -> dict[str, Any]:
    """The row of one run. `make` may change the task's optimizer; batches `without` are drawn and not used."""
    made = TASKS[task].make(seed)
    trainer = make(made)
    user_lr = float(made.optimizer.param_groups[0]["lr"])
    start = first_step(seed)
    fault = NO_FAULT
    if trial:
        spec = {"at": start, **TRIALS[trial].spec}
        fault = parse(spec, model=trainer.model, optimizer=trainer.optimizer, seed=seed)
    diary = Diary(start if trial else num_steps, num_steps=num_steps, adam="betas" in made.optimizer.defaults)
    seen, drawn = dict[int, float](), dict[str, float]()
    rates = [user_lr]
    hook = trainer.optimizer.register_step_pre_hook(lambda o, *_: rates.append(float(o.param_groups[0]["lr"])))

    def look(step: int) -> None:
        left = num_steps - 1 - step
        if left % EVERY == 0 and (left < SCORED * EVERY or (curve and step >= start - EVERY)):
            seen[step] = made.held_out()
            if curve:  # as the loss reads, where the fault is in the reading
                drawn[str(step)] = float(
                    fault.loss(step, torch.tensor(seen[step], dtype=torch.float64))
                )  # sync: cadence

    with quiet_log():
        try:
            stopped = _train(made, trainer, fault, diary, num_steps=num_steps, without=without, look=look)
        finally:
            hook.remove()
            trainer.close()
    finite = weights_finite(made.model)
    last = list(seen.values())[-SCORED:]
    whole = finite and not stopped and len(last) == SCORED
    return diary.as_row() | {
        "start": start,
        "score": sum(last) / SCORED if whole else math.nan,
        "finite": finite,
        "stopped": stopped,
        "lost": num_steps - trainer.updates,
        "lr": rates[-1] / user_lr,
        "curve": drawn,
    }


def _train(
    task: Task,
    trainer: Trainer,
    fault: Fault,
    diary: Diary,
    *,
    num_steps: int,
    without: Container[int],
    look: Callable[[int], None],
) -> str:
    """Why it ended before its last step, if it did."""
    left = _GRACE
    for step in range(num_steps):
        batch = fault.batch(step, task.batch())
        if step in without:
            continue
        try:
            with fault.at(step):
                tick = trainer.step(_work(task, fault, step), batch)
        except Stopped as end:
            return str(end)
        except Exception as error:  # whatever an arm does with a broken run is its result
            return f"crashed: {type(error).__name__}: {error}"[:200]
        task.after_step()
        diary.note(tick)
        look(step)
        if not math.isfinite(tick.loss) and not weights_finite(task.model):
            left -= 1
            if not left:
                return ""  # why: NaN weights do not heal, so there is nothing more to see
    return ""


def _work(task: Task, fault: Fault, step: int) -> Callable[[Any], Tensor]:
    return lambda batch: fault.loss(step, task.loss(batch))
