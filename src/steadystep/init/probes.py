"""Measures every layer during one forward and backward pass, without a host read until the end."""

import math
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadystep.init.report import LayerScale
from steadystep.init.slots import unwrap
from steadystep.names import plain

# Where a tanh and a sigmoid are flat: at an argument of 5 (Wardat et al. 2022, DeepDiagnosis).
_TANH_FLAT = 0.9999
_SIGMOID_FLAT = 0.0067


@final
class Probe:
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
class Probes:
    """Hooks on every layer that has weights of its own or no parts, for the length of a `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = []
        self._seen: dict[nn.Module, Probe] = {}
        self._names = {m: plain(n) for n, m in unwrap(model).named_modules() if _is_layer(m)}

    def __enter__(self) -> "Probes":
        self._handles = [module.register_forward_hook(self._hook) for module in self._names]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _hook(self, module: nn.Module, inputs: object, output: object) -> None:
        tensor = next(float_tensors(output), None)
        if tensor is not None and tensor.numel():
            probe = self._seen.setdefault(module, Probe(self._names[module], module))
            probe.see_output(inputs, tensor)

    def layers(self, loss: Tensor) -> tuple[LayerScale, ...]:
        """In the order in which the forward pass reached them first."""
        return tuple(probe.scale(loss.detach()) for probe in self._seen.values())


def _is_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) or any(p is not None for p in module._parameters.values())


def float_tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in whatever a layer takes or returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from float_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from float_tensors(part)


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
