"""The gradients an optimizer is about to use, with names, in the order `model.parameters()` gives them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.tensors import Layout, is_sharded, layout_of, local_part
from steadystep._utils.text import plain_name
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.records import Signals

NO_PARAMETERS = "the optimizer holds no parameters: give it those of the model, model.parameters()"


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
            raise MisuseError("nothing to train: no parameter in the optimizer requires a gradient")
        ours = {id(p) for p in model.parameters()}
        if not any(id(p) in ours for p in self.parameters):
            raise MisuseError(
                "the optimizer holds none of this model's parameters: build it from model.parameters() after the model"
            )

    def versions(self) -> tuple[int | None, ...]:
        """The version counter of each gradient; None where there is none."""
        return tuple([None if (grad := p.grad) is None else grad._version for p in self.parameters])

    def named(self) -> tuple[tuple[str, ...], tuple[Parameter, ...]]:
        """All that the optimizer holds, with their names."""
        return self._names, self.parameters

    def collect(self) -> tuple[tuple[str, ...], list[Tensor], Layout]:
        """Names, gradients and their grouping for this step."""
        if self._groups_changed():
            self._name_all()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self._sharded:
            grads = [local_part(grad) for grad in grads]
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


def _named(model: nn.Module, held: dict[int, Parameter]) -> Iterator[tuple[str, Parameter]]:
    for name, parameter in model.named_parameters():  # tied weights come once
        if id(parameter) in held:
            yield plain_name(name), parameter


def _check_supported(name: str, parameter: Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise UnsupportedError(f"{name} is not initialised yet: run one batch through the model before guarding it")


@final
class Transfer:
    """One read for many numbers: `add` says where each will be, `read` brings them.

    >>> transfer = Transfer([torch.tensor(1.0), torch.tensor(2.0)])
    >>> losses = transfer.add([torch.tensor(3.0)])
    >>> values = transfer.read()
    >>> values[:2], values[losses]
    ([1.0, 2.0], [3.0])
    """

    __slots__ = ("_scalars", "together")

    def __init__(self, first: Iterable[Tensor] = (), second: Iterable[Tensor] = ()) -> None:
        self._scalars: list[Tensor] = [*first, *second]
        self.together: Tensor | None = None
        """After `read`, all of them side by side on their device; None where they were on several."""

    def __len__(self) -> int:
        return len(self._scalars)

    def add(self, scalars: Iterable[Tensor]) -> slice:
        """Tensors of no dimension; the place they will have in what `read` returns."""
        start = len(self._scalars)
        self._scalars.extend(scalars)
        return slice(start, len(self._scalars))

    def read(self, flat: Sequence[Tensor] = ()) -> list[float]:
        """All of them, then the elements of `flat`, tensors of one dimension each."""
        scalars = self._scalars
        if not scalars:
            return []
        try:
            self.together = torch.stack(scalars)
        except RuntimeError:  # more than one device; asking each of them would cost every step of everybody else
            return _read_mixed(scalars, flat)
        return _read(self.together, flat)


def _read(together: Tensor, flat: Sequence[Tensor]) -> list[float]:
    if flat:
        together = torch.cat([together, *(numbers.to(together.device) for numbers in flat)])
    values: list[float] = together.tolist()  # sync: once per look
    return values


def _read_mixed(scalars: Sequence[Tensor], flat: Sequence[Tensor]) -> list[float]:
    """Numbers of the host are read where they are; the others ride together from the first one's device."""
    away = [scalar for scalar in scalars if not scalar.is_cpu]
    if not away:
        return _read(torch.stack(list(scalars)), flat)
    values = _read(torch.stack([scalar.to(away[0].device) for scalar in away]), flat)
    read = iter(values)
    return [float(s) if s.is_cpu else next(read) for s in scalars] + values[len(away) :]  # sync: none on the host


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
