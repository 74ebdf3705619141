"""steadystep keeps a PyTorch training run on course.

Public names load on first use: `import steadystep` itself imports nothing heavy (torch alone costs over a second).
"""

import random
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from steadystep import _deprecated
from steadystep.version import __version__

if TYPE_CHECKING:
    from steadystep import (
        checkpoints,
        clip,
        detectors,
        faults,
        groups,
        incidents,
        init,
        layers,
        memory,
        precision,
        schedule,
        testing,
        tracking,
    )
    from steadystep.config import Config, autopilot, careful, observe
    from steadystep.errors import (
        CheckpointError,
        ConfigError,
        MisuseError,
        SteadystepError,
        TrainingHalted,
        UnsupportedError,
    )
    from steadystep.guard import Guard
    from steadystep.lr_finder import find_lr
    from steadystep.records import Diagnosis, Finding, Outcome, Plan, Signals
    from steadystep.watching import watch

_HOMES = {
    "Guard": "guard",
    "find_lr": "lr_finder",
    "watch": "watching",
    "Config": "config",
    "observe": "config",
    "careful": "config",
    "autopilot": "config",
    "Signals": "records",
    "Finding": "records",
    "Diagnosis": "records",
    "Plan": "records",
    "Outcome": "records",
    "SteadystepError": "errors",
    "ConfigError": "errors",
    "CheckpointError": "errors",
    "MisuseError": "errors",
    "UnsupportedError": "errors",
    "TrainingHalted": "errors",
}
_PARTS = (
    "checkpoints",
    "clip",
    "detectors",
    "faults",
    "groups",
    "incidents",
    "init",
    "layers",
    "memory",
    "precision",
    "schedule",
    "testing",
    "tracking",
)

_deprecated.install()

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "Diagnosis",
    "Finding",
    "Guard",
    "MisuseError",
    "Outcome",
    "Plan",
    "Signals",
    "SteadystepError",
    "TrainingHalted",
    "UnsupportedError",
    "__version__",
    "autopilot",
    "careful",
    "checkpoints",
    "clip",
    "detectors",
    "faults",
    "find_lr",
    "groups",
    "incidents",
    "init",
    "layers",
    "memory",
    "observe",
    "precision",
    "schedule",
    "testing",
    "tracking",
    "watch",
]


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return _load(name)
    if f"steadystep.{name}" in _deprecated.MODULES:
        return _load(name)
    if name in _HOMES:
        return getattr(_load(_HOMES[name]), name)
    raise AttributeError(f"module 'steadystep' has no attribute {name!r}")


def _load(name: str) -> ModuleType:
    numbers = random.getstate()  # why: some packages draw when they are imported, and a seeded program would notice
    try:
        return import_module(f"steadystep.{name}")
    finally:
        random.setstate(numbers)


def __dir__() -> list[str]:
    return __all__
