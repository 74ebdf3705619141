"""Which settings differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steadystep.report.words import NOTHING


def differing(settings: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Each setting that is not the same everywhere: its name, and its value in every run.

    >>> differing([{"training": {"lr": 1e-3, "seed": 1}}, {"training": {"lr": 3e-3, "seed": 1}}])
    (('training.lr', ('0.001', '0.003')),)
    """
    flat = [dict(_flat(one)) for one in settings]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [(name, tuple(one.get(name, NOTHING) for one in flat)) for name in names]
    return tuple((name, values) for name, values in rows if len(set(values)) > 1)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, NOTHING if value is None else str(value)
