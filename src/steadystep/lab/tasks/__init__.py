"""Reference tasks: small, offline, on one core, and each with something that a detector may mistake for trouble."""

from steadystep.lab.tasks.autoencoder import AUTOENCODER
from steadystep.lab.tasks.bytes_gpt import GPT_BAD_INIT, GPT_POST_LN, GPT_TASK
from steadystep.lab.tasks.clusters import CLUSTERS, DEEP_MLP, EPOCHS, RESTARTS
from steadystep.lab.tasks.digits import DIGITS_CNN, DIGITS_MLP
from steadystep.lab.tasks.flat import FLAT
from steadystep.lab.tasks.moons import MOONS
from steadystep.lab.tasks.policy import GRPO, POLICY
from steadystep.lab.tasks.regression import REGRESSION
from steadystep.lab.tasks.rnn import ELMAN, RNN
from steadystep.lab.tasks.task import Task, TaskInfo

_JUDGED = (GPT_TASK, CLUSTERS, REGRESSION, AUTOENCODER, POLICY, GRPO, FLAT, RNN, EPOCHS, RESTARTS)
_MORE = (GPT_POST_LN, GPT_BAD_INIT, ELMAN, DEEP_MLP, DIGITS_MLP, DIGITS_CNN, MOONS)

TASKS: dict[str, TaskInfo] = {info.name: info for info in (*_JUDGED, *_MORE)}
"""By name."""

JUDGED: tuple[str, ...] = tuple(info.name for info in _JUDGED)
"""Those that limits were chosen on and the guard is judged on: they stay as they are, to the bit."""

__all__ = ["JUDGED", "TASKS", "Task", "TaskInfo"]
