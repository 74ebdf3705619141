"""Whether all ranks were given the same program: compared once, when a guard is made, with the same answer everywhere.

Another setting on one rank does not fail by itself: ranks that accumulate differently wait for each other for half an
hour, ranks that clip differently drift apart. First a checksum of each section is compared; only where one differs, its
contents are sent.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.config import Config
from steadystep.names import plain
from steadystep.version import __version__

Sections = Mapping[str, Mapping[str, str]]
SECTIONS = ("versions", "settings", "parameters", "buffers", "optimizer", "detectors")

# What only the first rank makes use of, or what each has of its own.
_OWN = (
    "monitoring.sinks",
    "monitoring.sink_frequency",
    "monitoring.log_frequency",
    "recovery.snapshot_memory_gb",
    "recovery.incident_batch_mb",
)
_SHOWN = 3


def sections(config: Config, model: nn.Module, optimizer: Optimizer, detectors: Sequence[Any] = ()) -> Sections:
    """Everything that has to be the same on every rank."""
    return {
        "versions": {"steadystep": __version__, "torch": torch.__version__.partition("+")[0]},
        "settings": _flat(config.model_dump(mode="json")),
        "parameters": {plain(name): _form(p) for name, p in model.named_parameters()},
        "buffers": {plain(name): _form(b) for name, b in model.named_buffers()},
        "optimizer": _options(optimizer),
        "detectors": {str(number): str(getattr(d, "name", d)) for number, d in enumerate(detectors)},
    }


def checksum(section: Mapping[str, str]) -> int:
    """A number for it, of 62 bits: an all-gather sends signed ones."""
    text = json.dumps(section, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 2


def difference(section: str, every: Sequence[Mapping[str, str]]) -> str:
    """What differs in it, in words; the first few.

    >>> difference("settings", [{"mode": "'observe'"}, {"mode": "'careful'"}, {"mode": "'careful'"}])
    "settings: mode is 'observe' on rank 0 and 'careful' on ranks 1, 2"
    """
    names = list(dict.fromkeys(name for each in every for name in each))
    odd = [name for name in names if len({each.get(name) for each in every}) > 1]
    said = [_values(name, [each.get(name, "missing") for each in every]) for name in odd[:_SHOWN]]
    more = f"; and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    return f"{section}: {'; '.join(said)}{more}"


def _values(name: str, values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return f"{name} is " + " and ".join(f"{value} on {_who(found)}" for value, found in ranks.items())


def _who(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and not prefix:
            found |= _flat(value, f"{key}.")
        elif prefix + key not in _OWN:
            found[prefix + key] = repr(value)
    return found


def _form(tensor: Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "not made yet"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _options(optimizer: Optimizer) -> dict[str, str]:
    found = {"kind": type(optimizer).__name__}
    for place, group in enumerate(optimizer.param_groups):
        found[f"group {place} parameters"] = str(len(group["params"]))
        for key, value in group.items():
            if isinstance(value, bool | int | float | tuple | str) or value is None:
                found[f"group {place} {key}"] = repr(value)
            elif isinstance(value, Tensor) and value.numel() == 1:
                found[f"group {place} {key}"] = repr(float(value))  # sync: once, when a guard is made
    return found
