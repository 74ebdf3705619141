"""The fourteen tasks, by name."""

from tests.field.tasks.generative import Contrastive, Diffusion, Gan, Vae
from tests.field.tasks.reinforcement import Dqn, Ppo, Reinforce
from tests.field.tasks.supervised import Digits, Graphs, Lora, NoisyRegression, Series, Tabular, Text
from tests.field.tasks.task import Batch, Player, Task, fixed

_KINDS: tuple[type[Task], ...] = (
    Text,
    Digits,
    Tabular,
    Vae,
    Diffusion,
    Contrastive,
    Series,
    Graphs,
    Lora,
    Reinforce,
    Ppo,
    Dqn,
    Gan,
    NoisyRegression,
)
TASKS: dict[str, type[Task]] = {kind.name: kind for kind in _KINDS}

__all__ = ["TASKS", "Batch", "Player", "Task", "fixed"]
