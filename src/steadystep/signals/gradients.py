"""The gradients an optimizer is about to use, with names, in the order `model.parameters()` gives them.

Also here: what a whole step computes, as it is compared with the same step computed again.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.tensors import Layout, is_sharded, layout_of, local_part, reduced_gradient
from steadystep._utils.text import plain_name
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.records import Signals

_ANNOUNCING = ("initial_lr", "max_lr")
NO_PARAMETERS = "the optimizer has no parameters: pass it model.parameters()"


def learning_rates(optimizer: Optimizer) -> tuple[list[float], list[Tensor], float]:
    """Of all groups, and the largest announced: torch's schedulers write what they rise to into the groups."""
    numbers: list[float] = []
    tensors: list[Tensor] = []
    largest = 0.0
    for group in optimizer.param_groups:
        lr = group.get("lr", 0.0)
        (tensors if isinstance(lr, Tensor) else numbers).append(lr)
        for key in _ANNOUNCING:
            value = group.get(key, 0.0)
            if isinstance(value, float | int):
                largest = max(largest, float(value))
    return numbers, tensors, largest


@final
class Gradients:
    """Collects `.grad` of every parameter the optimizer holds; tied weights once, missing gradients not at all.

    Of a sharded gradient it is the part that this rank holds, sharing memory.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._layout = layout_of([])
        self.parameters: tuple[Parameter, ...]
        """All that the optimizer holds."""
        self._name_all()
        if not any(p.requires_grad for p in self.parameters):
            if any(p.requires_grad for p in model.parameters()):
                raise MisuseError(
                    "nothing to train: the optimizer holds none of this model's parameters that require a gradient: "
                    "build it from those"
                )
            raise MisuseError("nothing to train: no parameter in the optimizer requires a gradient")
        ours = {id(p) for p in model.parameters()}
        if not any(id(p) in ours for p in self.parameters):
            raise MisuseError(
                "the optimizer holds none of this model's parameters: build it from model.parameters() after the model"
            )

    def versions(self) -> tuple[int | None, ...]:
        """The version counter of each gradient; None where there is none."""
        if not self._sharded:
            return tuple([None if (grad := p.grad) is None else grad._version for p in self.parameters])
        return tuple(map(_version_of, (*(p.grad for p in self.parameters), *unreduced_in(self._model))))

    def named(self) -> tuple[tuple[str, ...], tuple[Parameter, ...]]:
        """All that the optimizer holds, with their names."""
        return self._names, self.parameters

    def collect(self) -> tuple[tuple[str, ...], list[Tensor], Layout]:
        """Names, gradients and their grouping for this step."""
        if self._groups_changed():
            self._name_all()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self._sharded:
            grads = [local_part(reduced_gradient(p)) for p in self.parameters if p.grad is not None]
        names = self._names
        if len(grads) < len(self.parameters):
            names = tuple(n for n, p in zip(names, self.parameters, strict=True) if p.grad is not None)
        # why: asking each gradient whether it is sparse costs more than the norm of a small one; a parameter that
        # once had a sparse gradient is the only kind that has to be asked again.
        if not self._layout.fits(grads) or self._layout.sparse:
            self._layout = layout_of(grads)
        return names, grads, self._layout

    def regroup(self, grads: list[Tensor]) -> Layout:
        """Group anew: a gradient turned sparse."""
        self._layout = layout_of(grads)
        return self._layout

    def _groups_changed(self) -> bool:
        """The user added, removed or replaced a parameter group."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._held):
            return True
        for group, (params, count) in zip(groups, self._held, strict=True):
            if group["params"] is not params or len(params) != count:
                return True
        return False

    def _name_all(self) -> None:
        groups = [(group["params"], len(group["params"])) for group in self._optimizer.param_groups]
        held = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        named = dict(_named(self._model, held))
        ours = {id(p) for p in named.values()}
        extra = (p for p in held.values() if id(p) not in ours)
        named |= {f"optimizer parameter {i}": p for i, p in enumerate(extra)}
        if not named:
            raise MisuseError(NO_PARAMETERS)
        for name, parameter in named.items():
            _check_supported(name, parameter)
        self._held = groups  # from here on nothing is refused: a mistake in the groups costs the step that meets it
        self._names = tuple(named)
        self.parameters = tuple(named.values())
        self._sharded = is_sharded(self.parameters)


def unreduced_in(model: nn.Module) -> Iterator[Tensor | None]:
    """The gradients that FSDP2 keeps whole on each rank until a pass is reduced: accumulation without synchronization.

    Torch has no name for them; where it has moved them to, there are none.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # who has used it has imported it
    for module in model.modules() if fsdp is not None else ():
        if not isinstance(module, fsdp.FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for held in (held for group in groups for held in getattr(group, "fsdp_params", ())):
            grad = getattr(held, "unsharded_accumulated_grad", None)  # where sums are kept in another dtype
            yield grad if grad is not None else getattr(getattr(held, "_unsharded_param", None), "grad", None)


def _version_of(grad: Tensor | None) -> int | None:
    """Of a DTensor that of both: FSDP2 adds to the part of this rank, a loop may multiply the DTensor around it."""
    if grad is None:
        return None
    part = local_part(grad)
    return grad._version if part is grad else grad._version + part._version


def _named(model: nn.Module, held: dict[int, Parameter]) -> Iterator[tuple[str, Parameter]]:
    for name, parameter in model.named_parameters():  # tied weights come once
        if id(parameter) in held:
            yield plain_name(name), parameter


def _check_supported(name: str, parameter: Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise UnsupportedError(
            f"{name} is not initialized yet: run one batch through the model before creating the guard"
        )


@final
@dataclass(frozen=True, slots=True)
class GradientView:
    """The gradients of one update as they were measured: numbers for the judge, tensors for whoever applies it."""

    signals: Signals
    grads: list[Tensor]
    """Emptied once the update is over: holding them would keep their memory from being freed."""
    layout: Layout
    norms: list[Tensor]
    """Of each gradient, still on the device."""
    stacked: Tensor | None = None
    """The same side by side, where they are: what was stacked to be read serves the clipping too."""
    names: tuple[str, ...] = ()
    """Of `grads`; in a pipeline `signals` names those of all stages."""


class Probing(Protocol):
    """The heavier look that MEASURE takes around an update; ACT tells it when that is."""

    every: int
    """Steps; from there on nothing is due at any other step than its multiples."""

    def due(self, step: int) -> bool:
        """Whether the update of `step` is to be measured."""
        ...

    def before(self) -> None:
        """The update is about to be taken."""
        ...

    def after(self, step: int) -> None:
        """It has been taken."""
        ...

    def cancel(self) -> None:
        """What was measured no longer holds."""
        ...


_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@dataclass(frozen=True, slots=True)
class StepResult:
    """What one computation of a step has left behind."""

    losses: list[Tensor]
    names: tuple[str, ...]
    grads: list[Tensor | None]
    buffers: dict[str, Tensor]
    sums: list[list[Tensor]]
    """With several ranks: over the bits of each gradient of this rank, before they were averaged."""

    def items(self) -> dict[str, Tensor | None]:
        """Everything that is compared, by name."""
        losses = {"loss" if not i else f"loss of micro-batch {i}": loss for i, loss in enumerate(self.losses)}
        grads = zip((f"gradient of {name}" for name in self.names), self.grads, strict=True)
        return {**losses, **dict(grads), **self.buffers}

    def same(self, other: "StepResult") -> bool:
        """Bit for bit."""
        mine, others = self.items(), other.items()
        return all(_equal(tensor, others.get(name)) for name, tensor in mine.items()) and all(
            _equal_sums(a, b) for a, b in zip(self.sums, other.sums, strict=True)
        )

    def near(self, other: "StepResult", bounds: Sequence[float]) -> bool:
        """Within `bounds`, by which `distances` may differ."""
        return all(far <= bound for far, bound in zip(self.distances(other), bounds, strict=True))

    def distances(self, other: "StepResult") -> list[float]:
        """Of losses as a share of each, of gradients as a share of the norm of all; infinite if not comparable."""
        losses = [(_distance(a, b), _distance(a, a * 0)) for a, b in zip(self.losses, other.losses, strict=True)]
        whole = math.hypot(*(_distance(grad, grad * 0) for grad in self.grads if grad is not None))
        far = [(_distance(a, b), whole) for a, b in zip(self.grads, other.grads, strict=True)]
        shares = [a / b if b > 0.0 else a and math.inf for a, b in (*losses, *far)]
        return [share if math.isfinite(share) else math.inf for share in shares]

    def differing(self, other: "StepResult") -> dict[str, int]:
        """Bits that differ, of each tensor that does."""
        others = other.items()
        bits = {name: _differing(tensor, others.get(name)) for name, tensor in self.items().items()}
        return {name: count for name, count in bits.items() if count}

    def is_local(self, name: str, other: "StepResult") -> bool:
        """Whether it differs on this rank by itself, and not only in what was averaged."""
        grads = [f"gradient of {each}" for each in self.names]
        return name not in grads or not _equal_sums(self.sums[grads.index(name)], other.sums[grads.index(name)])


def _equal_sums(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def add_bits(sums: list[Tensor], grad: Tensor) -> None:
    """Note the sum over the bits of a gradient: a hook."""
    sums.append(_bits(grad).sum(dtype=torch.int64))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_AS_INTEGERS[plain.element_size()])


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(_bits(one), _bits(other))  # sync: at a cadence


def _differing(one: Tensor | None, other: Tensor | None) -> int:
    """Bits; all of a tensor that is there only once."""
    if one is None or other is None or one.shape != other.shape:
        there = one if one is not None else other
        return 0 if there is None else 8 * there.nbytes
    changed = (_bits(one) ^ _bits(other)).contiguous().cpu().numpy().reshape(-1).view(np.uint8)  # sync: in trouble
    return int(np.unpackbits(changed[changed != 0]).sum())


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return 0.0 if one is other else math.inf
    return float((one.detach().double() - other.detach().double()).norm())  # sync: at a cadence
