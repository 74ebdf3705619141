"""One copy of each small idea that several rooms share."""

import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

_EXPORT = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return a module-level `__getattr__` for `package`: each name is imported from its module when it is asked for.

    Args:
        package: `__name__` of the package.
        homes: names by the module that defines them, relative to the package: `terminal`, `.runs.run_log`.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module("." + modules[name], package), name)

    return load


def stub_homes(stub: str) -> dict[str, str]:
    """Return the module of each name that a stub re-exports, one per line as `from module import name as name`."""
    return {name: module for module, name in _EXPORT.findall(stub)}


def object_at(name: str) -> Any:
    """Return what `package.module:name` names; modules in the working directory are found too."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return attrgetter(attribute)(import_module(module))


def load_quietly(module: str) -> ModuleType:
    """Import a module and leave Python's random state as it was.

    Some packages draw random numbers while they are imported, which would change a seeded program.
    """
    numbers = random.getstate()
    try:
        return import_module(module)
    finally:
        random.setstate(numbers)
