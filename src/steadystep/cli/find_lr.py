"""`steadystep find-lr`: the learning-rate range probe on a built-in task."""

import torch
from rich.console import Console

from steadystep.errors import ConfigError
from steadystep.lab.tasks import TASKS
from steadystep.names import nearest_names
from steadystep.probe import find_lr


def run(task: str, *, seed: int, steps: int, as_json: bool) -> None:
    """Sweep, and print the curve with what it says."""
    if task not in TASKS:
        raise ConfigError(f"task {task!r} is not built in{nearest_names(task, list(TASKS))}")
    torch.set_num_threads(1)  # why: matrices this small are slower on two threads
    made = TASKS[task].make(seed)
    curve = find_lr(made.model, made.optimizer, lambda: made.loss(made.batch()), num_steps=steps)
    console = Console(soft_wrap=True, highlight=False)
    console.print(curve.to_json() if as_json else str(curve), markup=False)
