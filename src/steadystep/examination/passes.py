"""A pass of the model, which part each tensor of a batch plays in it, and the same samples in another form."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.tree import children, mapped, rebuilt, tensors_in
from steadystep.examination.workbench import Workbench
from steadystep.signals.loss_calls import ActivationOrigin, LossCall, LossRecorder

_PASSES = 24
"""Batches that are run forward."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The tensors of one forward pass, by the part they play."""

    inputs: dict[str, Tensor]
    """Tensors of the batch that the model was given, by their place in the batch."""
    targets: dict[str, Tensor]
    """The other tensors of the batch."""
    given: tuple[Tensor, ...]
    """What the model was called with."""
    modules: tuple[nn.Module, ...]
    """The model, or the parts of it that were called instead; once per call."""
    outputs: tuple[Tensor, ...]
    loss: float
    calls: tuple[LossCall, ...]
    """Loss functions that were called."""
    differences: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Shapes of subtractions whose result is larger than both sides."""
    softmaxes: tuple[ActivationOrigin, ...] = ()
    """Every softmax of the pass."""

    @property
    def num_samples(self) -> int:
        """By the first dimension of the inputs."""
        return max((num_rows(tensor) for tensor in self.inputs.values()), default=0)

    @property
    def unchanged(self) -> dict[str, Tensor]:
        """Inputs that the model is given as they are in the batch: the loss does not scale them first."""
        return {n: t for n, t in self.inputs.items() if any(_is_same(t, each) for each in self.given)}

    def with_inputs(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """A batch of the same form with each input that has a row per sample changed."""
        return _replaced(batch, self.inputs, change)

    def with_one_input(self, batch: Any, name: str, change: Callable[[Tensor], Tensor]) -> Any:
        """A batch of the same form with a single input changed."""
        return _replaced(batch, (name,), change)

    def with_targets(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """A batch of the same form with each target that has a row per sample changed."""
        return _replaced(batch, self.targets, change)


def _replaced(batch: Any, names: Container[str], change: Callable[[Tensor], Tensor]) -> Any:
    """Another batch in which the tensors of these names are changed, as far as containers hold them."""
    # why by position: one tensor may stand in a batch twice, as input and as target
    named = list(tensors_in(batch))
    size = max((num_rows(t) for name, t in named if name in names), default=0)
    chosen = iter(named)

    def replace(tensor: Tensor) -> Tensor:
        name = next(name for name, each in chosen if each is tensor)  # objects are passed over: they stay as they are
        return change(tensor) if name in names and num_rows(tensor) == size else tensor

    return mapped(batch, replace)


@final
@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module from outside of the model."""

    module: nn.Module
    given: Any
    output: Any


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """The outermost calls: of the model itself, or of its parts where a loop calls those."""
    calls: list[ModuleCall] = []
    inside: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        inside.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while inside and inside.pop() is not module:  # why: a call that raised has left none
            pass
        if not inside:
            calls.append(ModuleCall(module, (args, kwargs), output))

    hooks = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, with_kwargs=True)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def observe_passes(bench: Workbench) -> list[Pass]:
    """Run the loss of several batches once, and tell inputs from targets."""
    with bench.set_aside(), torch.no_grad():
        batches = bench.every[:_PASSES]
        return [_observe(bench, batch, whole=number == 0) for number, batch in enumerate(batches)]


def _observe(bench: Workbench, batch: Any, *, whole: bool) -> Pass:
    with recorded_calls(bench.model) as calls:
        recorder, loss = record_losses(bench.loss, batch)
    given = [tensor for call in calls for _, tensor in tensors_in(call.given)]
    held = dict(tensors_in(batch))
    inputs = {name: tensor for name, tensor in held.items() if any(_is_same(tensor, each) for each in given)}
    if not inputs and len(held) > 1:  # why: a loss may scale or cast its input first; targets come last by custom
        inputs = dict(list(held.items())[:-1])
    if len(inputs) == len(held) > 1 and len(given) < len(held):  # the same tensor twice, as with input and target
        inputs = dict(list(held.items())[: len(given)])
    if len(held) == 1:  # the loss makes input and target of one tensor
        inputs = held
    compared = [call.target for call in recorder.calls if call.target is not None]
    known = {name for name, tensor in held.items() if any(_is_same(tensor, each) for each in compared)}
    if known and known != set(held):  # what is neither given nor compared is made into an input on the way
        inputs = {name: tensor for name, tensor in held.items() if name not in known or name in inputs}
    targets = {name: tensor for name, tensor in held.items() if name not in inputs}
    outputs = tuple(t for call in calls for _, t in tensors_in(call.output) if t.is_floating_point() and t.dim())
    return Pass(
        inputs=inputs,
        targets=targets,
        given=tuple(given),
        modules=tuple(call.module for call in calls),
        outputs=outputs if whole else (),  # why: logits of many batches would take much memory
        loss=float(loss.detach()),  # sync: examined
        calls=tuple(recorder.calls if whole else (call.without_outputs() for call in recorder.calls)),
        differences=tuple(recorder.differences),
        softmaxes=tuple(recorder.softmaxes),
    )


def _is_same(held: Tensor, given: Tensor) -> bool:
    """Whether the model was given this tensor: itself, a view, or a copy of another type."""
    if held is given or held.layout is not torch.strided or given.layout is not torch.strided or held.is_nested:
        return held is given  # why: neither sparse nor ragged tensors have one place in memory
    if held.data_ptr() == given.data_ptr() and held.numel() and given.numel():
        return True
    if held.numel() != given.numel():
        return False
    kind = torch.promote_types(held.dtype, given.dtype) if held.is_complex() or given.is_complex() else torch.float64
    return torch.equal(held.flatten().to(kind), given.flatten().to(kind))


def num_rows(tensor: Tensor) -> int:
    """How many samples, by the first dimension."""
    return tensor.size(0) if tensor.dim() else 0  # why not the shape: tensors of ragged rows have none


def links(tensor: Tensor) -> bool:
    """Whether it says which samples belong together: sparse, a list of edges, or an adjacency matrix."""
    if tensor.layout is not torch.strided:
        return True
    if tensor.dim() != 2 or tensor.shape[1] <= 4:
        return False
    if tensor.shape[0] == tensor.shape[1]:
        sums = tensor.sum(1)
        return bool(
            (tensor == tensor.T).all() or ((tensor >= 0).all() and (sums - 1).abs().max() < 1e-3)
        )  # sync: examined
    return tensor.shape[0] == 2 and tensor.dtype == torch.int64


def over_batches(passes: Sequence[Pass], pick: Callable[[Pass], Tensor | None]) -> Tensor | None:
    """One tensor per pass, joined along the samples; None where they do not fit together."""
    found = [tensor for tensor in map(pick, passes) if tensor is not None]
    if not found or len({tensor.shape[1:] for tensor in found}) != 1 or found[0].dim() == 0:
        return None
    return torch.cat([tensor.detach() for tensor in found])


@final
@dataclass(frozen=True, slots=True)
class Scaling:
    """Mean and deviation of each feature of the first real-valued input."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, batches: Sequence[Any], parts: dict[str, Tensor], *, by_feature: bool = True) -> "Scaling | None":
        """That of the first real tensor of these that is of an unusual scale."""
        for name, tensor in parts.items():
            if tensor.is_floating_point() and tensor.dim() > int(by_feature):
                found = cls._measured([t for batch in batches for n, t in tensors_in(batch) if n == name])
                if found is not None and found.is_unusual:
                    return found
        return None

    @classmethod
    def _measured(cls, found: Sequence[Tensor]) -> "Scaling | None":
        if len({tensor.shape[1:] for tensor in found}) != 1:
            return None
        every = torch.cat([tensor.detach().float() for tensor in found])
        if not bool(every.isfinite().all()):  # sync: examined
            return None
        mean, deviation = every.mean(0), every.std(0)
        return cls(mean, deviation.where(deviation > 1e-12, torch.ones_like(deviation)))

    @property
    def is_unusual(self) -> bool:
        """Far from zero or of a size that layers are not made for."""
        size, spread = float(self.mean.abs().max()), float(self.deviation.max())  # sync: once per examination
        return size > 5.0 or spread > 5.0 or spread < 0.05

    def apply(self, tensor: Tensor) -> Tensor:
        """Standardize; another input than the one measured stays."""
        if tensor.shape[1:] != self.mean.shape or not tensor.is_floating_point():
            return tensor
        return (tensor - self.mean.to(tensor)) / self.deviation.to(tensor)


def mixed(batches: Sequence[Any]) -> list[Any] | None:
    """The same samples dealt out anew; None where batches do not fit together."""
    if len(batches) < 2:
        return None
    try:
        whole = _joined(list(batches))
    except (RuntimeError, TypeError, ValueError):
        return None
    sizes = {num_rows(tensor) for tensor in _leaves(whole)}
    if len(sizes) != 1:
        return None
    order = torch.randperm(sizes.pop(), generator=torch.Generator().manual_seed(0))
    size = math.ceil(len(order) / len(batches))
    return [_picked(whole, order[at : at + size]) for at in range(0, len(order), size)]


def joined_batches(batches: Sequence[Any], times: int) -> list[Any] | None:
    """Batches that are joined, so many into one; None where they do not fit together."""
    if len(batches) < 2:
        return None
    try:
        groups = [list(batches[at : at + times]) for at in range(0, len(batches), times)]
        return [_joined(group) for group in groups if len(group) == min(times, len(batches))]
    except (RuntimeError, TypeError, ValueError):
        return None


def fits(bench: Workbench, batch: Any) -> bool:
    """Whether the loss takes it: a matrix of links between samples cannot be joined with another."""
    try:
        with bench.set_aside():
            bench.losses([batch])
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return True


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    inner = [children(part) for part in parts]
    if any(each is None for each in inner):
        raise TypeError
    columns = zip(*[[part for _, part in each or ()] for each in inner], strict=True)
    return rebuilt(parts[0], [_joined(list(column)) for column in columns])


def _leaves(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    else:
        for _, part in children(thing) or ():
            yield from _leaves(part)


def _picked(thing: Any, order: Tensor) -> Any:
    if isinstance(thing, Tensor):
        return thing[order.to(thing.device)]
    return rebuilt(thing, [_picked(part, order) for _, part in children(thing) or ()])


def record_losses(loss: Callable[[Any], Tensor], batch: Any) -> tuple[LossRecorder, Tensor]:
    """Run the loss of a batch once, and return what it called, and the loss with its graph."""
    recorder = LossRecorder(tensor for _, tensor in tensors_in(batch))
    with recorder:
        value = loss(batch)
    return recorder, value
