"""What ranks send each other, as sums, bytes and texts; what must be the same on all; passes that all make.

What is run again is the user's code at a time they did not expect, and may fail on one rank alone. The others would
then wait for it inside a collective of their forward or backward pass. So the ranks agree twice for each pass: on
entering the model or the schedule of a pipeline, and after the closure. A pass that fails inside the model's forward,
between two messages of its own, cannot be called off: it ends the run as it does without a guard, by the group's
timeout.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import device_of
from steadystep._utils.text import plain_name
from steadystep.config import Config
from steadystep.parallel.single_process import Sections
from steadystep.parallel.stages import PIPELINES, Removable, Stages
from steadystep.version import __version__

_TEXT = 1024  # bytes
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


@final
class Channel:
    """Sends numbers and texts between the ranks of a group. Nothing is ever pickled."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.group = group
        self.size: int = dist.get_world_size(group)
        self.device = _device_for(model, group)

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Each added up over the ranks, in fp64."""
        payload = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(payload, group=self.group)
        sums: list[float] = payload.tolist()  # sync: on an accelerator once more per step
        return sums

    def least(self, number: float) -> float:
        """The smallest of all ranks."""
        value = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.group)
        return float(value)  # sync: now and then

    def texts(self, text: str) -> list[str]:
        """What every rank says, cut to a kilobyte."""
        raw = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        every = self.gathered(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        said = [bytes(each.tolist()) for each in every]  # sync: only in trouble
        return [each.rstrip(b"\0").decode(errors="ignore") for each in said]

    def documents(self, text: str) -> list[str]:
        """Texts of any length."""
        raw = zlib.compress(text.encode())
        sizes = [int(size) for size in self.gathered(torch.tensor([float(len(raw))], dtype=torch.float64))]
        mine = torch.frombuffer(bytearray(raw.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        said = [bytes(each.tolist()) for each in self.gathered(mine)]  # sync: only in trouble
        return [zlib.decompress(each[:size]).decode() for each, size in zip(said, sizes, strict=True)]

    def gathered(self, mine: Tensor) -> list[Tensor]:
        """The same tensor of every rank, in host memory."""
        sent = mine.to(self.device)
        every = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(every, sent, group=self.group)
        return [each.cpu() for each in every]  # sync: when a guard is made, and in trouble


def _device_for(model: nn.Module, group: Any) -> torch.device:
    """Host memory where the group can send it: then agreeing does not wait for the accelerator."""
    if "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return device_of(model.parameters())


def sections(config: Config, model: nn.Module, optimizer: Optimizer, detectors: Sequence[Any] = ()) -> Sections:
    """Everything that has to be the same on every rank."""
    staged = isinstance(model, Stages)  # of a pipeline every rank has another part
    return {
        "versions": {"steadystep": __version__, "torch": torch.__version__.partition("+")[0]},
        "settings": _flat(config.model_dump(mode="json")),
        "parameters": {} if staged else {plain_name(name): _form(p) for name, p in model.named_parameters()},
        "buffers": {} if staged else {plain_name(name): _form(b) for name, b in model.named_buffers()},
        "optimizer": _options(optimizer, counts=not staged),
        "detectors": {str(number): str(getattr(d, "name", d)) for number, d in enumerate(detectors)},
    }


def checksum(section: Mapping[str, str]) -> int:
    """A number for it, of 52 bits: exact as a float."""
    text = json.dumps(section, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 12


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
        return "not initialized yet"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _options(optimizer: Optimizer, *, counts: bool) -> dict[str, str]:
    found = {"kind": type(optimizer).__name__}
    for place, group in enumerate(optimizer.param_groups):
        found |= {f"group {place} parameters": str(len(group["params"]))} if counts else {}
        for key, value in group.items():
            if isinstance(value, bool | int | float | tuple | str) or value is None:
                found[f"group {place} {key}"] = repr(value)
            elif isinstance(value, Tensor) and value.numel() == 1:
                found[f"group {place} {key}"] = repr(float(value))  # sync: once, when a guard is made
    return found


def compared(channel: Channel, sections: Sections, *, wrong: str) -> str:
    """What differs between the ranks, or what is wrong on one of them, in the same words everywhere; else "".

    Checksums first; what differs is sent only then. A rank with a mistake has nothing to compare.
    """
    mine = [float(bool(wrong)), *(float(checksum(sections.get(name, {}))) for name in SECTIONS)]
    every = channel.gathered(torch.tensor(mine, dtype=torch.float64))
    if any(bool(row[0]) for row in every):
        said = [(rank, text) for rank, text in enumerate(channel.texts(wrong)) if text]
        return "; ".join(dict.fromkeys(f"rank {rank} cannot create its guard: {text}" for rank, text in said[:2]))
    odd = [name for place, name in enumerate(SECTIONS, start=1) if len({float(row[place]) for row in every}) > 1]
    if not odd:
        return ""
    found = [channel.documents(json.dumps(sections[name])) for name in odd]
    told = [difference(name, [json.loads(text) for text in texts]) for name, texts in zip(odd, found, strict=True)]
    stage = ". For a pipeline, create its PipelineStage before the guard" if PIPELINES in sys.modules else ""
    return f"the ranks differ. {'. '.join(told)}. Use the same settings, model and optimizer on every rank{stage}"


class ElsewhereError(Exception):
    """The closure failed on another rank, or here and the others know: the pass is called off on all of them."""


def in_lockstep(
    work: Callable[..., Tensor],
    when_entered: Callable[[Callable[..., None]], Removable],
    agree: Callable[[bool], bool],
    *,
    undo: Callable[[], None],
) -> Callable[..., Tensor]:
    """Return `work`, made by all ranks or by none.

    Args:
        work: computes a loss with a model.
        when_entered: calls back before the first message of a forward pass, until it is removed.
        agree: whether a flag is true on every rank; a collective.
        undo: called where it fails: brings the model into the form it has between two passes.

    Raises:
        ElsewhereError: on all ranks when it failed on one, there with what it raised as its cause.
    """

    def run(*batch: Any) -> Tensor:
        votes = _Votes(agree)
        handle = when_entered(votes.enter)
        try:
            loss = work(*batch)
            votes.enter()  # a closure that calls only parts of the model
            votes.cast(True)
        except ElsewhereError:
            undo()
            raise
        except Exception as error:
            votes.cast(False)
            undo()
            raise ElsewhereError(f"{type(error).__name__}: {error}") from error  # why: nobody waits for this pass
        finally:
            handle.remove()
        return loss

    return run


@final
class _Votes:
    """Those of one rank about one pass: on entering the model, or on failing before, and at its end."""

    def __init__(self, agree: Callable[[bool], bool]) -> None:
        self._agree = agree
        self._entered = False

    def enter(self, *_: object) -> None:
        """At the first call of the model."""
        if not self._entered:
            self.cast(True)

    def cast(self, well: bool) -> None:
        """Raise where all is well here and not on every rank."""
        self._entered = True
        if not self._agree(well) and well:
            raise ElsewhereError
