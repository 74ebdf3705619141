"""A look at a model before its first step: one forward and backward pass, then everything as it was."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.buffers import Buffers
from steadystep.errors import ConfigError, MisuseError
from steadystep.init.findings import find
from steadystep.init.probes import Probes, float_tensors, rms
from steadystep.init.report import InitReport
from steadystep.init.slots import unwrap
from steadystep.names import plain
from steadystep.rng import HostRandom, RngState

LossFunction = Callable[[Any], Tensor]


def check_init(
    model: nn.Module, batch: Any, loss_fn: LossFunction | None = None, *, num_classes: int | None = None
) -> InitReport:
    """Run one batch and report the scale of activations and gradients, layer by layer.

    `loss_fn(batch)` returns the loss, as a guard's closure does. Without it, a pair `(inputs, target)` gets
    cross-entropy for integer targets and squared error for real ones, a mapping is passed on as keyword arguments (and
    `.loss` of the output is used), and anything else is the input, with the mean square of the output for a loss.
    Weights, buffers, gradients and random numbers are afterwards what they were before.

    >>> from steadystep.init import initialise_
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> table = initialise_(model, "kaiming", seed=0)
    >>> report = check_init(model, (torch.randn(64, 8), torch.arange(64) % 10))
    >>> report.healthy, report.expected_loss == math.log(10)
    (True, True)
    """
    if num_classes is not None and num_classes < 2:
        raise ConfigError(f"num_classes = {num_classes!r}: must be at least 2")
    root = unwrap(model)
    with _left_as_found(root), Probes(root) as probes, _eager(), torch.enable_grad():
        loss, classes = (loss_fn(batch), None) if loss_fn is not None else _default_loss(root, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise MisuseError("loss_fn must return the loss as a tensor of one element that depends on the weights")
        loss.sum().backward()  # type: ignore[no-untyped-call]
        layers = probes.layers(loss)
        unused = tuple(plain(n) for n, p in root.named_parameters() if p.requires_grad and p.grad is None)
        value = loss.item()  # sync: before training
    classes = num_classes or classes
    expected = math.log(classes) if classes else None
    scale = max([1.0, *(rms(t).item() for t in float_tensors(batch) if t.numel())])  # sync: before training
    return InitReport(
        loss=value,
        expected_loss=expected,
        layers=layers,
        unused=unused,
        findings=find(layers, loss=value, expected_loss=expected, input_scale=scale),
    )


def _eager() -> AbstractContextManager[object]:
    """Hooks are not part of a compiled graph. Nothing is compiled before dynamo is loaded, which takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    values = [p.detach().clone() for p in parameters]
    buffers = Buffers(model)
    buffers.remember()
    devices = {p.device for p in parameters} or {torch.device("cpu")}
    random_states: list[HostRandom | RngState] = [HostRandom(), *(RngState(device) for device in devices)]
    try:
        for p in parameters:
            p.grad = None
        yield
    finally:
        with torch.no_grad():
            for p, gradient, value in zip(parameters, gradients, values, strict=True):
                p.grad = gradient
                if not torch.equal(p, value):  # an embedding with max_norm writes to its weight in forward
                    p.copy_(value)
        buffers.put_back()
        for state in random_states:
            state.restore()


def _default_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int | None]:
    if isinstance(batch, Mapping):
        return _own_loss(model(**batch)), None
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return _supervised(_first(model(batch[0])), batch[1])
    output = model(*batch) if isinstance(batch, list | tuple) else model(batch)
    if isinstance(output, Tensor) and output.ndim == 0:
        return output, None
    return _first(output).float().square().mean(), None


def _own_loss(output: Any) -> Tensor:
    """What models of the transformers library return."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise MisuseError("the model returned no .loss for this batch: add the labels to it, or give loss_fn")
    found: Tensor = loss
    return found


def _first(output: Any) -> Tensor:
    tensor = next(float_tensors(output), None)
    if tensor is None:
        raise MisuseError(f"the model returned {type(output).__name__} with no real tensor in it: give loss_fn")
    return tensor


def _supervised(output: Tensor, target: Tensor) -> tuple[Tensor, int | None]:
    if target.is_floating_point():
        if output.shape != target.shape:
            shapes = f"{tuple(output.shape)} and {tuple(target.shape)}"
            raise MisuseError(f"output and target have the shapes {shapes}: give loss_fn")
        return functional.mse_loss(output.float(), target.float()), None
    if output.ndim > 1 and output.shape[:-1] == target.shape:  # classes last, as in language models
        return functional.cross_entropy(output.flatten(0, -2), target.flatten()), output.shape[-1]
    if output.ndim == target.ndim + 1 and output.shape[2:] == target.shape[1:]:  # classes second, as in images
        return functional.cross_entropy(output, target), output.shape[1]
    raise MisuseError(f"no class dimension in {tuple(output.shape)} for targets {tuple(target.shape)}: give loss_fn")
