"""The gradients an optimizer is about to use, with names, in the order `model.parameters()` gives them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.tensors import Layout, is_sharded, layout_of, local_part, reduced_gradient
from steadystep._utils.text import plain_name
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.records import Signals

NO_PARAMETERS = "the optimizer has no parameters: pass it model.parameters()"


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
