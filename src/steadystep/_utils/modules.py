"""A model without what others have wrapped around it, while it is evaluated, and left as it was found."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel

from steadystep._utils.rng import HostRandom, RngState, generator_back
from steadystep._utils.tensors import is_writable, local_part
from steadystep.errors import MisuseError

_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_forward_module")
"""The child that torch.compile, FSDP1 and Lightning Fabric keep the model in."""


def unwrapped(model: nn.Module, *, by_form: bool = False) -> nn.Module:
    """The model inside DDP, DataParallel, torch.compile, FSDP1 and Fabric, in any order; any other as it is.

    Args:
        model: wrapped or not.
        by_form: also go into a wrapper of an unknown class: a module without parameters of its own whose only child
            is called `module`. A model may look like this too, so not where its names are kept in a file.
    """
    while (inner := _inside(model, by_form=by_form)) is not None:
        model = inner
    return model


def data_parallel_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a model, with torch.compile around it or not."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, running statistics; training mode is put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _inside(model: nn.Module, *, by_form: bool) -> nn.Module | None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        held: nn.Module = model.module
        return held
    for name in _INNER:
        if model._modules.get(name) is not None:
            return model._modules[name]
    if by_form and [name for name, _ in model.named_children()] == ["module"]:
        return None if any(True for _ in model.parameters(recurse=False)) else next(model.children())
    return None


@contextmanager
def left_as_found(
    model: nn.Module, parameters: Iterable[Parameter] = (), generators: Sequence[torch.Generator] = ()
) -> Iterator[None]:
    """Weights, gradients, buffers, training modes and random numbers are afterwards what they were before.

    Weights and buffers are copied and copied back. Gradients are set aside, and the very same tensors return; inside
    there are none at first. Not covered is what torch, Python and NumPy do not know of: the position of an iterator, a
    generator of your own, attributes a module keeps for itself.

    Args:
        model: its parameters, buffers and modes.
        parameters: more of them, such as those that only an optimizer knows.
        generators: random numbers beside torch's, Python's and NumPy's own.

    >>> model = nn.Linear(1, 1)
    >>> before = model.weight.item()
    >>> with left_as_found(model):
    ...     _ = nn.init.zeros_(model.weight)
    >>> model.weight.item() == before
    True
    """
    weights = list(dict.fromkeys([*model.parameters(), *parameters]))
    if any(nn.parameter.is_lazy(p) for p in weights):
        raise MisuseError("the model has uninitialized lazy parameters: run one forward pass first")
    copies = [TensorCopy(p) for p in weights]
    parts: list[TensorCopy | ModuleState | _Random] = [*copies, ModuleState(model), _Random(model, generators)]
    with gradients_aside(weights):
        try:
            yield
        finally:
            for part in parts:
                part.put_back()


@contextmanager
def gradients_aside(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Inside there are none at first, out of reach of whoever clears gradients; the very same tensors return."""
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad


@final
class ModuleState:
    """Buffers by identity and value, and each module's training mode, of a model or of these modules of one."""

    def __init__(self, model: nn.Module | Sequence[nn.Module]) -> None:
        each = model.modules() if isinstance(model, nn.Module) else model
        self._modules = [(module, module.training, dict(module._buffers)) for module in each]
        tensors = {id(t): t for _, _, buffers in self._modules for t in buffers.values() if t is not None}
        self._copies = [TensorCopy(t) for t in tensors.values() if is_writable(t)]

    def put_back(self) -> None:
        for module, training, buffers in self._modules:
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers)
        for kept in self._copies:
            kept.put_back()


@final
class _Random:
    """torch's random state on every device in use, Python's, NumPy's and that of the given generators."""

    def __init__(self, model: nn.Module, generators: Sequence[torch.Generator]) -> None:
        devices = {torch.device("cpu"), *(p.device for p in model.parameters())}
        self._states: list[HostRandom | RngState] = [HostRandom(), *(RngState(device) for device in devices)]
        self._generators = [generator_back(generator) for generator in generators]

    def put_back(self) -> None:
        for state in self._states:
            state.restore()
        for back in filter(None, self._generators):
            back()


@final
class TensorCopy:
    """A tensor and what it held, or this rank's part of it."""

    __slots__ = ("_tensor", "_value", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._value = local_part(tensor).detach().clone()
        self._version = tensor._version

    @property
    def differs(self) -> bool:
        """It holds something else than it held."""
        now = local_part(self._tensor).detach()
        return not self._fits(now) or not torch.equal(now, self._value)

    def put_back(self) -> None:
        """Nothing is written where nothing was: a graph made before may still need the tensor."""
        if self._tensor._version != self._version or self.differs:
            self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Write in any case, and in place where it still has the shape, dtype and device."""
        now = local_part(self._tensor)
        if self._fits(now):
            now.copy_(self._value)
        else:
            self._tensor.data = self._value

    def _fits(self, now: Tensor) -> bool:
        kept = self._value
        return now.shape == kept.shape and now.dtype == kept.dtype and now.device == kept.device
