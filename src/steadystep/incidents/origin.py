"""What a look for the birthplace of a NaN comes back with."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, final

import torch
from pydantic import ConfigDict
from torch import Tensor

from steadystep._utils.tensors import local_part
from steadystep.records import Record

Phase = Literal["forward", "backward", "loss", "weights", "input", "none"]
Culprit = Literal["input", "weight", "activation", "gradient", "loss", "none"]

_JSON = ConfigDict(ser_json_inf_nan="strings", extra="forbid")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Record):
    """Where a step first became non-finite when it was run again."""

    __pydantic_config__ = _JSON

    module: str = ""
    """Path inside the model; "" for the model itself or, with no `type`, for what happens outside of it."""
    type: str = ""
    """The module's class."""
    phase: Phase = "none"
    culprit: Culprit = "none"
    tensor: str = ""
    """The parameter, buffer, input or operation, where one can be named."""
    what: str = ""
    """One plain clause."""
    reproduces: bool = False
    """Whether the second run went wrong too. A transient fault of the hardware does not repeat."""

    @property
    def place(self) -> str:
        """For a sentence: "blocks.3.attn (Attention)"."""
        if not self.type:
            return "the loss function" if self.phase in ("loss", "backward") else "outside the model"
        return f"{self.module or 'the model itself'} ({self.type})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Examination(Record):
    """One step run again under hooks: its origin, and numbers to compare with those seen the first time."""

    __pydantic_config__ = _JSON

    origin: Origin = field(default_factory=Origin)
    loss: float = float("nan")
    grad_norm: float = float("nan")
    """Global L2 norm without the loss scale; NaN when no backward pass was run."""

    @property
    def finite(self) -> bool:
        """Nothing went wrong this time."""
        return self.origin.phase == "none"


class Badness(IntEnum):
    """How far a tensor is from finite."""

    FINITE = 0
    MASK = 1
    """-inf and nothing worse: an overflow, or how masks are written."""
    BAD = 2
    """NaN or +inf."""


@torch.no_grad()
def badness(tensor: Tensor) -> Badness:
    """NaN and +inf are bad. -inf alone is not sure to be. What torch cannot look into counts as finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.is_meta:
        return Badness.FINITE
    try:
        values = _values(tensor.detach())
        if bool(values.isfinite().all()):  # sync: only in trouble
            return Badness.FINITE
        worse = values.is_complex() or bool((values.isnan() | (values == math.inf)).any())  # sync: only in trouble
        return Badness.BAD if worse else Badness.MASK
    except (NotImplementedError, RuntimeError):
        return Badness.FINITE


def count_bad(tensor: Tensor) -> int:
    """How many elements are NaN or infinite."""
    return int((~_values(tensor.detach()).isfinite()).sum())  # sync: only in trouble


@torch.no_grad()
def kind_of(tensors: Iterable[Tensor]) -> str:
    """The worst there is in them, as a word."""
    words = set()
    for tensor in tensors:
        if badness(tensor):
            values = _values(tensor.detach())
            if bool(values.isnan().any()):  # sync: only in trouble
                return "NaN"
            words.add("inf" if values.is_complex() or bool((values == math.inf).any()) else "-inf")  # sync: as above
    return min(words, key=len) if words else "nothing"


def _values(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    # fp8 has no comparisons of its own
    return tensor.float() if tensor.element_size() == 1 else tensor
