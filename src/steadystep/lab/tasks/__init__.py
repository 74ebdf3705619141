"""Reference tasks: small, offline, on one core, and each with something that a detector may mistake for trouble."""

from collections.abc import Callable

from steadystep.lab.tasks.classification import CLUSTERS, DEEP_MLP, DIGITS_CNN, DIGITS_MLP, EPOCHS, MOONS, RESTARTS
from steadystep.lab.tasks.task import AUTOENCODER, FLAT, GRPO, POLICY, REGRESSION, Task, TaskInfo
from steadystep.lab.tasks.text import ELMAN, GPT_BAD_INIT, GPT_POST_LN, GPT_TASK, RNN

_JUDGED = (GPT_TASK, CLUSTERS, REGRESSION, AUTOENCODER, POLICY, GRPO, FLAT, RNN, EPOCHS, RESTARTS)
_MORE = (GPT_POST_LN, GPT_BAD_INIT, ELMAN, DEEP_MLP, DIGITS_MLP, DIGITS_CNN, MOONS)

TASKS: dict[str, TaskInfo] = {info.name: info for info in (*_JUDGED, *_MORE)}
"""By name."""

FACTORIES: dict[str, Callable[[int], Task]] = {name: info.make for name, info in TASKS.items()}
"""What `train` calls with a seed."""

JUDGED: tuple[str, ...] = tuple(info.name for info in _JUDGED)
"""Those that limits were chosen on and the guard is judged on: they stay as they are, to the bit."""

__all__ = ["FACTORIES", "JUDGED", "TASKS", "Task", "TaskInfo"]
