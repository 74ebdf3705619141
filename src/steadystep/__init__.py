"""steadystep keeps a PyTorch training run on course.

Public names load on first use: `import steadystep` itself imports nothing heavy (torch alone costs over a second).
They are listed once, in `__init__.pyi`.
"""

import pkgutil

from steadystep import _deprecated
from steadystep._utils import load_quietly, stub_homes

_deprecated.install_finder()

_homes = stub_homes((pkgutil.get_data(__name__, "__init__.pyi") or b"").decode())  # also from a zip

__all__ = sorted(_homes)  # type checkers read the stub


def __getattr__(name: str) -> object:
    home = _homes.get(name)
    if home == __name__ or f"{__name__}.{name}" in _deprecated.MODULES:
        return load_quietly(f"{__name__}.{name}")
    if home is not None:
        return getattr(load_quietly(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
