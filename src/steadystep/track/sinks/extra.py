"""Packages that not everybody has."""

from importlib.util import find_spec

from steadystep.errors import ConfigError


def is_installed(package: str) -> bool:
    """Whether it could be imported, without importing it."""
    return find_spec(package) is not None


def need(package: str) -> None:
    """A clear error where it is not there."""
    if not is_installed(package):
        raise ConfigError(f"the {package} sink needs its package: pip install 'steadystep[{package}]'")
