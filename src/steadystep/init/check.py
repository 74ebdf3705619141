"""A look at a model before its first step: one forward and backward pass, then everything as it was."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from steadystep._utils.modules import left_as_found, unwrapped
from steadystep._utils.text import plain_name
from steadystep._utils.tree import held_in
from steadystep.errors import ConfigError, MisuseError
from steadystep.init.findings import InitReport, LayerScale, find

# Where a tanh and a sigmoid are flat: at an argument of 5 (Wardat et al. 2022, DeepDiagnosis).
_TANH_FLAT = 0.9999
_SIGMOID_FLAT = 0.0067


@final
class LayerProbe:
    """One layer's numbers, as tensors on its device."""

    __slots__ = ("gradient", "module", "name", "output", "shares")

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.output: Tensor | None = None
        self.shares: tuple[Tensor, Tensor] | None = None
        self.gradient: Tensor | None = None

    def see_output(self, inputs: object, output: Tensor) -> None:
        """Keep the numbers of the last call; a layer that is called often looks much the same each time."""
        self.output = rms(output)
        self.shares = _shares(next(float_tensors(inputs), None))
        if output.requires_grad:
            output.register_hook(self.see_gradient)  # type: ignore[no-untyped-call]

    def see_gradient(self, gradient: Tensor) -> None:
        """Called by autograd, once for each call of the layer."""
        norm = _norm(gradient)
        self.gradient = norm if self.gradient is None else torch.hypot(self.gradient, norm)

    def scale(self, loss: Tensor) -> LayerScale:
        """Everything as plain numbers."""
        output, shares = self.output, self.shares
        assert output is not None
        parts = [output, *(shares or ()), *([] if self.gradient is None else [self.gradient])]
        pull = _pull(self.module, loss)
        parts += [] if pull is None else [pull]
        numbers = torch.stack([part.to(output) for part in parts]).tolist()  # sync: once per layer, before training
        values = iter(numbers)
        return LayerScale(
            name=self.name,
            kind=type(self.module).__name__,
            output_rms=next(values),
            input_zeros=next(values) if shares else None,
            input_saturated=next(values) if shares else None,
            output_grad_norm=None if self.gradient is None else next(values),
            pull=None if pull is None else next(values),
        )


@final
class LayerProbes:
    """Hooks on every layer that has weights of its own or no parts, for the length of a `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = []
        self._seen: dict[nn.Module, LayerProbe] = {}
        self._names = {m: plain_name(n) for n, m in unwrapped(model).named_modules() if _is_layer(m)}

    def __enter__(self) -> "LayerProbes":
        self._handles = [module.register_forward_hook(self._hook) for module in self._names]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _hook(self, module: nn.Module, inputs: object, output: object) -> None:
        tensor = next(float_tensors(output), None)
        if tensor is not None and tensor.numel():
            probe = self._seen.setdefault(module, LayerProbe(self._names[module], module))
            probe.see_output(inputs, tensor)

    def layers(self, loss: Tensor) -> tuple[LayerScale, ...]:
        """In the order in which the forward pass reached them first."""
        return tuple(probe.scale(loss.detach()) for probe in self._seen.values())


def _is_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) or any(p is not None for p in module._parameters.values())


def float_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in whatever a layer takes or returns."""
    return (tensor for tensor in held_in(value) if tensor.is_floating_point())


def rms(tensor: Tensor) -> Tensor:
    """Divided by the largest value first: squares leave fp32 at 1e19, and not every device has doubles."""
    x = tensor.detach().float()
    peak = x.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return peak * (x / peak).square().mean().sqrt()


def _norm(tensor: Tensor) -> Tensor:
    return rms(tensor) * math.sqrt(tensor.numel())


def _shares(tensor: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Zeros and saturated values in what other layers computed; the model's own input is not judged."""
    if tensor is None or not tensor.requires_grad or not tensor.numel():
        return None
    x = tensor.detach().float()
    zeros = (x == 0).float().mean()
    size = x.abs()
    tanh = (size > _TANH_FLAT).float().mean() * (size <= 1).all()
    sigmoid = ((x < _SIGMOID_FLAT) | (x > 1 - _SIGMOID_FLAT)).float().mean()
    # why: values in [0, 1] with few exact zeros come from a sigmoid, not from a ReLU
    sigmoid = sigmoid * ((x >= 0) & (x <= 1)).all() * (zeros < 0.05)
    return zeros, torch.maximum(tanh, sigmoid)


@torch.no_grad()
def _pull(module: nn.Module, loss: Tensor) -> Tensor | None:
    """Over the weights (not the biases) that the layer owns."""
    products = []
    for p in module.parameters(recurse=False):
        if p.ndim >= 2 and p.numel() and p.grad is not None:
            gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
            products.append(_norm(gradient) * _norm(p))
    return torch.stack(products).sum() / loss.float().abs().clamp(min=1e-12) if products else None


LossFunction = Callable[[Any], Tensor]


def check_init(
    model: nn.Module, batch: Any, loss_fn: LossFunction | None = None, *, num_classes: int | None = None
) -> InitReport:
    """Run one batch and report the scale of activations and gradients, layer by layer.

    Weights, buffers, gradients and random state are left unchanged.

    Args:
        model: the model.
        batch: without `loss_fn`, a pair (inputs, target) gets cross-entropy for integer targets and squared error for
            real ones; a mapping is passed as keyword arguments, and `.loss` of the output is used; anything else is the
            input, with the mean square of the output as the loss.
        loss_fn: called as `loss_fn(batch)`; returns the loss.
        num_classes: number of classes, for the expected loss. Default: from the output.

    >>> from steadystep.init import initialise_
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> table = initialise_(model, "kaiming", seed=0)
    >>> report = check_init(model, (torch.randn(64, 8), torch.arange(64) % 10))
    >>> report.healthy, report.expected_loss == math.log(10)
    (True, True)
    """
    if num_classes is not None and num_classes < 2:
        raise ConfigError(f"num_classes = {num_classes!r}: must be at least 2")
    root = unwrapped(model)
    with left_as_found(root), LayerProbes(root) as probes, _eager(), torch.enable_grad():
        loss, classes = (loss_fn(batch), None) if loss_fn is not None else _default_loss(root, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise MisuseError("loss_fn must return the loss as a tensor of one element that depends on the weights")
        loss.sum().backward()  # type: ignore[no-untyped-call]
        layers = probes.layers(loss)
        unused = tuple(plain_name(n) for n, p in root.named_parameters() if p.requires_grad and p.grad is None)
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
        raise MisuseError("the model returned no .loss for this batch: add the labels to the batch, or pass loss_fn")
    found: Tensor = loss
    return found


def _first(output: Any) -> Tensor:
    tensor = next(float_tensors(output), None)
    if tensor is None:
        raise MisuseError(f"the model returned {type(output).__name__} without a real-valued tensor: pass loss_fn")
    return tensor


def _supervised(output: Tensor, target: Tensor) -> tuple[Tensor, int | None]:
    if target.is_floating_point():
        if output.shape != target.shape:
            shapes = f"{tuple(output.shape)} and {tuple(target.shape)}"
            raise MisuseError(f"output and target have shapes {shapes}: pass loss_fn")
        return functional.mse_loss(output.float(), target.float()), None
    if output.ndim > 1 and output.shape[:-1] == target.shape:  # classes last, as in language models
        return functional.cross_entropy(output.flatten(0, -2), target.flatten()), output.shape[-1]
    if output.ndim == target.ndim + 1 and output.shape[2:] == target.shape[1:]:  # classes second, as in images
        return functional.cross_entropy(output, target), output.shape[1]
    raise MisuseError(f"no class dimension in {tuple(output.shape)} for targets {tuple(target.shape)}: pass loss_fn")
