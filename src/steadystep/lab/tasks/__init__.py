"""Reference tasks: small, offline, on one core, and each with something that a detector may mistake for trouble."""

from steadystep.lab.tasks.autoencoder import AUTOENCODER
from steadystep.lab.tasks.bytes_gpt import GPT_TASK
from steadystep.lab.tasks.clusters import CLUSTERS, EPOCHS, RESTARTS
from steadystep.lab.tasks.flat import FLAT
from steadystep.lab.tasks.policy import GRPO, POLICY
from steadystep.lab.tasks.regression import REGRESSION
from steadystep.lab.tasks.rnn import RNN
from steadystep.lab.tasks.task import Task, TaskInfo

TASKS: dict[str, TaskInfo] = {
    info.name: info for info in (GPT_TASK, CLUSTERS, REGRESSION, AUTOENCODER, POLICY, GRPO, FLAT, RNN, EPOCHS, RESTARTS)
}
"""By name."""

__all__ = ["TASKS", "Task", "TaskInfo"]
