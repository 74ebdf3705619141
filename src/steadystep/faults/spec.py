"""Faults from plain data: a YAML file, a JSON line, a dictionary."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.faults.declaration import declared
from steadystep.faults.fault import Fault
from steadystep.faults.together import together


def parse(
    spec: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, model: nn.Module, optimizer: Optimizer, seed: int = 0
) -> Fault:
    """The fault that was declared, or all of them as one. Raises `ConfigError` with every mistake in it.

    Each has a `kind` (see `KINDS`) and an `at`: a step, a list of steps, "first-last" or {start, steps}; `for` (or
    `steps`) says how long it lasts, a number or "ever". With `rank` it happens on one rank of a distributed run only.
    What is left open (which element, which order) is drawn from `seed` and the step.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> fault = parse({"kind": "lr-scale", "at": 500, "factor": 10}, model=model, optimizer=optimizer)
    >>> for step in (499, 500, 501):
    ...     with fault.at(step):
    ...         print(step, optimizer.param_groups[0]["lr"])
    499 0.1
    500 1.0
    501 0.1
    >>> parse({"kind": "lr-scale", "at": 500, "facter": 10}, model=model, optimizer=optimizer)
    Traceback (most recent call last):
    ...
    steadystep.errors.ConfigError: fault: unknown key 'facter': did you mean 'factor'?
    """
    if isinstance(spec, Mapping):
        entries: dict[str, Any] = {"fault": spec}
    elif isinstance(spec, list | tuple):
        entries = {f"faults[{i}]": entry for i, entry in enumerate(spec)}
    else:
        raise ConfigError(f"faults: expected a mapping or a list of mappings, got {type(spec).__name__}")
    made, problems = list[Fault](), list[str]()
    for where, entry in entries.items():
        try:
            made.append(declared(entry, where=where).made(model, optimizer, seed=seed))
        except ConfigError as error:
            problems.append(str(error))
        except (MisuseError, UnsupportedError) as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return together(made)
