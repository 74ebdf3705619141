"""What a look for the birthplace of a NaN comes back with."""

from dataclasses import dataclass, field
from typing import Literal, final

from pydantic import ConfigDict

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
