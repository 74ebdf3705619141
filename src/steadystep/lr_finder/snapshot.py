"""Everything a training step can change, put back exactly, however the steps ended.

Weights and buffers are copied and copied back. Gradients, the optimizer's state and its groups are not: they are set
aside untouched, the steps work on fresh ones, and the very same objects return. Not covered is what torch, Python and
NumPy do not know of: the position of an iterator, a generator of your own, attributes a module keeps for itself.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.rng import HostRandom, RngState
from steadystep.errors import MisuseError


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Leave no trace of what happens inside the block, also when an exception or Ctrl-C ends it.

    >>> model = nn.Linear(1, 1)
    >>> before = model.weight.item()
    >>> with restored(model, torch.optim.SGD(model.parameters(), lr=1.0)):
    ...     _ = nn.init.zeros_(model.weight)
    >>> model.weight.item() == before
    True
    """
    parts = (_Weights(model, optimizer), _Modules(model), _OptimizerParts(optimizer), _Random(model, generators))
    try:
        yield
    finally:
        for part in parts:
            part.put_back()


@final
class _Weights:
    """Parameters by value, gradients by identity."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = list(dict.fromkeys([*model.parameters(), *held]))
        if any(nn.parameter.is_lazy(p) for p in self._parameters):
            raise MisuseError("the model has lazy parameters without a shape: run one forward pass first")
        self._copies = [p.detach().clone() for p in self._parameters]
        self._grads = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None

    @torch.no_grad()
    def put_back(self) -> None:
        for p, value, grad in zip(self._parameters, self._copies, self._grads, strict=True):
            p.copy_(value)
            p.grad = grad


@final
class _Modules:
    """Buffers by identity and value, and each module's training mode."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
        tensors = {id(t): t for _, _, buffers in self._modules for t in buffers.values() if t is not None}
        self._copies = [(t, t.detach().clone()) for t in tensors.values() if _writable(t)]

    @torch.no_grad()
    def put_back(self) -> None:
        for module, training, buffers in self._modules:
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, value in self._copies:
            tensor.copy_(value)


@final
class _OptimizerParts:
    """State, groups and whatever else the optimizer keeps (a torch scheduler leaves a flag there, say)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = dict(optimizer.state)
        fresh = copy.deepcopy(list(self._state.values()))
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        tensors = [t for _, values in self._groups for t in values.values() if isinstance(t, Tensor)]
        self._copies = [(t, t.detach().clone()) for t in tensors]
        self._attributes = dict(vars(optimizer))
        optimizer.state.clear()
        optimizer.state.update(zip(self._state, fresh, strict=True))

    @torch.no_grad()
    def put_back(self) -> None:
        _refill(vars(self._optimizer), self._attributes)
        _refill(self._optimizer.state, self._state)
        for group, values in self._groups:
            _refill(group, values)
        for tensor, value in self._copies:  # a learning rate may be a tensor
            tensor.copy_(value)


@final
class _Random:
    """torch's random state on every device in use, Python's, NumPy's and that of the given generators."""

    def __init__(self, model: nn.Module, generators: Sequence[torch.Generator]) -> None:
        devices = {torch.device("cpu"), *(p.device for p in model.parameters())}
        self._states: list[HostRandom | RngState] = [HostRandom(), *(RngState(device) for device in devices)]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def put_back(self) -> None:
        for state in self._states:
            state.restore()
        for generator, position in self._generators:
            generator.set_state(position)


def generators_of(source: object) -> list[torch.Generator]:
    """Those a DataLoader draws from, itself and through its sampler."""
    if not isinstance(source, torch.utils.data.DataLoader):
        return []
    held: Iterable[Any] = (source.generator, getattr(source.sampler, "generator", None))
    return list({id(g): g for g in held if isinstance(g, torch.Generator)}.values())


def _refill(mapping: dict[Any, Any], values: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(values)


def _writable(tensor: Tensor) -> bool:
    """An expanded or inference tensor cannot be written, so nobody did."""
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
