"""Public names that load on first use, so that importing a package stays quick."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


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
