"""Where a NaN was born: what a look for it comes back with, made of what the watches saw."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from torch.nn import Parameter

from steadystep._utils.tensors import local_part
from steadystep._utils.text import plain_name
from steadystep._utils.tree import tensors_in
from steadystep.records import Record

if TYPE_CHECKING:
    from steadystep.incidents.autograd_hooks import BackwardWatch, ForwardWatch, Suspect


Phase = Literal["forward", "backward", "loss", "weights", "input", "none"]
Culprit = Literal["input", "weight", "activation", "gradient", "loss", "none"]

_JSON = ConfigDict(ser_json_inf_nan="strings", extra="forbid")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Record):
    """Where a step first became non-finite when it was run again."""

    __pydantic_config__ = _JSON

    module: str = ""
    """Path inside the model; "" for the model itself or, without `type`, for code outside of it."""
    type: str = ""
    """Class of the module."""
    phase: Phase = "none"
    """Pass in which it happened."""
    culprit: Culprit = "none"
    """What was non-finite first."""
    tensor: str = ""
    """The parameter, buffer, input or operation, where one can be named."""
    what: str = ""
    """One plain clause."""
    reproduces: bool = False
    """Whether the second run went wrong too. A transient hardware fault does not repeat."""

    @property
    def place(self) -> str:
        """The module for a sentence: "blocks.3.attn (Attention)"."""
        if not self.type:
            return "the loss function" if self.phase in ("loss", "backward") else "outside the model"
        return f"{self.module or 'the model itself'} ({self.type})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NaNTrace(Record):
    """Result of running one step again under hooks: its origin, and numbers to compare with the first run."""

    __pydantic_config__ = _JSON

    origin: Origin = field(default_factory=Origin)
    """Where the step became non-finite."""
    loss: float = float("nan")
    """Loss of the second run."""
    grad_norm: float = float("nan")
    """Global L2 norm without the loss scale; NaN if no backward pass was run."""

    @property
    def finite(self) -> bool:
        """Whether everything was finite this time."""
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


Sick = Mapping[int, tuple[str, str]]
"""Weights that are not finite: by identity, their name and what is wrong."""


def sick_weights(model: nn.Module) -> dict[int, tuple[str, str]]:
    """Parameters and buffers that are not finite. A buffer may hold -inf: that is how masks are kept."""
    found: dict[int, tuple[str, str]] = {}
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            continue
        limit = Badness.MASK if isinstance(tensor, Parameter) else Badness.BAD
        if badness(tensor) >= limit:
            what = f"{count_bad(tensor)} of {tensor.numel()} values are {kind_of([tensor])}"
            found[id(tensor)] = (plain_name(path), what)
    return found


def of_weights(model: nn.Module, sick: Sick) -> Origin | None:
    """The first sick parameter, for when nothing was run or the run did not touch it."""
    for _, tensor in model.named_parameters():
        if id(tensor) in sick:
            return _sick_origin(model, *sick[id(tensor)])
    return None


def of_forward(model: nn.Module, watch: "ForwardWatch", sick: Sick, batch: Any, *, loss: Tensor) -> Origin:
    """The loss is not finite: who was it?"""
    suspect = watch.first()
    if suspect is not None and suspect.module is not None:
        for path, tensor in [*suspect.module.named_parameters(), *suspect.module.named_buffers()]:
            if id(tensor) in sick:
                name = f"{suspect.name}.{path}" if suspect.name else path
                return _sick_origin(model, plain_name(name), sick[id(tensor)][1])
        return Origin(
            module=suspect.name,
            type=type(suspect.module).__name__,
            phase="forward",
            culprit="activation",
            what=suspect.what,
            reproduces=True,
        )
    return _outside(model, suspect, sick, batch, loss)


def _outside(model: nn.Module, suspect: "Suspect | None", sick: Sick, batch: Any, loss: Tensor) -> Origin:
    for name, tensor in tensors_in(batch, "batch"):
        if badness(tensor) is Badness.BAD:
            what = f"{name} holds {kind_of([tensor])}"
            return Origin(phase="input", culprit="input", tensor=name, what=what, reproduces=True)
    if suspect is not None and suspect.from_data:
        return Origin(phase="input", culprit="input", tensor=suspect.tensor, what=suspect.what, reproduces=True)
    if suspect is not None:
        return Origin(phase="forward", culprit="activation", tensor=suspect.tensor, what=suspect.what, reproduces=True)
    weights = of_weights(model, sick)
    if weights is not None:
        return weights
    what = f"every module output is finite, and the loss is {kind_of([loss])}"
    return Origin(phase="loss", culprit="loss", what=what, reproduces=True)


def of_scaled_loss(scale: float) -> Origin:
    """A finite loss that its scale makes infinite."""
    what = f"the loss is finite, but not after multiplication by the loss scale {scale:g}"
    return Origin(phase="loss", culprit="loss", what=what, reproduces=True)


def of_backward(
    model: nn.Module, watch: "BackwardWatch", parameters: Sequence[Parameter], grads: Sequence[Tensor | None]
) -> Origin | None:
    """Who made a gradient bad; None when all are finite."""
    bad = [p for p, g in zip(parameters, grads, strict=True) if g is not None and badness(g)]
    if not bad:
        return None
    uses = "the gradients of its uses are finite, but their sum is not"
    return of_node(watch) or of_gradient(model, bad[0], uses)


def of_node(watch: "BackwardWatch") -> Origin | None:
    """The operation at which a gradient went bad; None when there was none."""
    node = watch.found
    if node is None:
        return None
    what = (
        f"the sum of finite gradients became {node.kind} before {node.name}"
        if node.summed
        else f"{node.name} turned a finite gradient into {node.kind}"
    )
    call = watch.call_of(node)
    if call is None:
        return Origin(phase="backward", culprit="loss", tensor=node.name, what=what, reproduces=True)
    return _gradient(call.name, type(call.module).__name__, tensor=node.name, what=what)


def of_gradient(model: nn.Module, parameter: Parameter, what: str) -> Origin:
    """A parameter's gradient is at fault, and no operation can be named."""
    name = next((plain_name(name) for name, p in model.named_parameters() if p is parameter), "")
    path, owner = _owner(model, name)
    return _gradient(path, type(owner).__name__, tensor=name, what=what)


def of_buffers(model: nn.Module, sick: Sick) -> Origin | None:
    """A buffer that only this forward pass made bad, such as a running variance."""
    for path, tensor in model.named_buffers():
        if id(tensor) not in sick and badness(tensor) is Badness.BAD:
            name = plain_name(path)
            what = f"loss and gradients are finite, but the forward pass wrote {kind_of([tensor])} into {name}"
            return _of_tensor(model, name, phase="forward", culprit="activation", what=what)
    return None


def _gradient(module: str, kind: str, *, tensor: str, what: str) -> Origin:
    return Origin(
        module=module, type=kind, phase="backward", culprit="gradient", tensor=tensor, what=what, reproduces=True
    )


def _sick_origin(model: nn.Module, name: str, what: str) -> Origin:
    return _of_tensor(model, name, phase="weights", culprit="weight", what=f"before the step, {what}")


def _of_tensor(model: nn.Module, name: str, *, phase: Phase, culprit: Culprit, what: str) -> Origin:
    path, owner = _owner(model, name)
    return Origin(
        module=path,
        type=type(owner).__name__,
        phase=phase,
        culprit=culprit,
        tensor=name,
        what=what,
        reproduces=True,
    )


def _owner(model: nn.Module, tensor: str) -> tuple[str, nn.Module]:
    path = tensor.rpartition(".")[0]
    owners = {plain_name(name): module for name, module in model.named_modules()}
    return path, owners.get(path, model)
