"""The command line: one file per verb. Here: checks that need no torch, made before a verb imports it."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError

TASK_NAMES = (
    *("gpt", "clusters", "regression", "autoencoder", "policy", "grpo", "flat", "rnn", "epochs", "restarts"),
    *("gpt-post-ln", "gpt-bad-init", "elman", "deep-mlp", "digits-mlp", "digits-cnn", "moons"),
)
"""Names of the built-in tasks, which themselves need torch; a test compares them."""


def check_task(task: str) -> None:
    """Refuse a task that cannot be there, before torch is imported for it.

    Args:
        task: a built-in task, or package.module:factory.
    """
    where, colon, name = task.partition(":")
    if not colon:
        if task not in TASK_NAMES:
            names = nearest_names(task, list(TASK_NAMES))
            raise ConfigError(f"task {task!r} is not built in{names} For your own task use package.module:factory")
        return
    if not all(part.isidentifier() for part in (*where.split("."), name)):
        raise ConfigError(
            f"task {task!r}: write it as package.module:factory, a module and a function in it, not a path"
        )
    if not is_module(where.split(".")[0]):
        raise ConfigError(f"task {task!r}: no module named {where.split('.')[0]!r} (searched from {Path.cwd()})")


def check_bundle(bundle: Path, factory: str) -> None:
    """Refuse what is no incident bundle, or no factory, before torch is imported for it."""
    if not bundle.is_dir():
        raise ConfigError(f"{bundle}: no such folder; a bundle is one such as runs/a/incidents/incident-000600-skip")
    if ":" not in factory:
        raise ConfigError(f"--factory {factory!r}: write it as package.module:function")


def is_module(name: str) -> bool:
    """Return whether there is such a module, here or installed, without importing it."""
    return name in sys.modules or PathFinder.find_spec(name, [str(Path.cwd()), *sys.path]) is not None
