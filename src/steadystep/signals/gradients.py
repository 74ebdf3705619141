"""The gradients an optimizer is about to use, with names, in the order `model.parameters()` gives them.

Also here: which parameters are trained, and with which settings, read without touching a number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor, float16, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from steadystep._utils.tensors import Layout, is_sharded, layout_of, local_part
from steadystep._utils.text import plain_name
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.records import Signals, Structure

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


_DECOUPLED = ("AdamW", "NAdamW", "Lion", "Adan", "Sophia", "Muon")
_PLAIN = ("SGD", "ASGD", "LBFGS")
_PLANNED = ("initial_lr", "max_lr")
_MODES = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def structure_of(model: nn.Module, optimizer: Optimizer) -> Structure:
    """As model and optimizer are now."""
    groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    held = {id(p): group for p, group in groups}
    named = [(plain_name(name), p) for name, p in model.named_parameters()]
    trained = [(name, p) for name, p in named if p.requires_grad and id(p) in held]
    decays = [_number(group.get("weight_decay", 0.0), 0.0) for group in optimizer.param_groups]
    each = getattr(optimizer, "each", (optimizer,))
    kinds = {type(one).__name__ for one in each}
    dropouts = {name: module.p for name, module in model.named_modules() if _is_dropout(module)}
    most = max(dropouts.values(), default=0.0)
    return Structure(
        trained=tuple(name for name, _ in trained),
        sizes=tuple(p.numel() for _, p in trained),
        frozen=sum(not p.requires_grad for _, p in named),
        unheld=tuple(name for name, p in named if p.requires_grad and id(p) not in held),
        last=named[-1][0] if named else "",
        announced=max((_number(g.get(key, 0.0), 0.0) for g in optimizer.param_groups for key in _PLANNED), default=0.0),
        rate_zero=tuple(name for name, p in trained if _number(held[id(p)].get("lr", 1.0), 1.0) == 0.0),
        weight_decay=max(decays, default=0.0),
        decoupled=bool(kinds & set(_DECOUPLED)) or any(group.get("decoupled_weight_decay") for _, group in groups),
        scale_free=not kinds & set(_PLAIN),
        dropout=most,
        dropouts=tuple(name for name, p in dropouts.items() if p == most > 0.0),
        half=sum(p.dtype is float16 for _, p in trained),
        modes=sum(_has_modes(module) for module in model.modules()),
    )


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _has_modes(module: nn.Module) -> bool:
    return isinstance(module, _MODES) and getattr(module, "p", 1.0) > 0.0


def _number(value: object, unknown: float) -> float:
    """A setting; `unknown` for one that is a tensor, which is not read here."""
    return float(value) if isinstance(value, int | float) else unknown
