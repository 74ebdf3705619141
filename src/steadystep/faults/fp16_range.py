"""Gradients that leave the range of fp16 on their way: 6e-8 to 65504.

The slope of the loss is multiplied on its way in, and each parameter's gradient divided by the same power of two on its
way out. In fp32 and bf16 that changes nothing at all. In fp16 what overflows comes out infinite, and what underflows
comes out zero; a loss scaler meets either exactly as it would in earnest, and can cure the first by backing off.
"""

from collections.abc import Container

from torch import Tensor, nn

from steadystep.faults.fault import Fault
from steadystep.faults.hooks import hooked, trained

OVERFLOW = 24  # as powers of two: a usual gradient of 1e-3 under a scale of 2^16 goes to 1e9
UNDERFLOW = -60  # the same goes to 6e-17


def fp16_overflow(model: nn.Module, *, steps: Container[int], power: int = OVERFLOW) -> Fault:
    """Gradients go through backward 2^power times too large. Give the loss through `fault.loss` too."""
    return _through("fp16-overflow", model, steps, 2.0**power)


def fp16_underflow(model: nn.Module, *, steps: Container[int], power: int = UNDERFLOW) -> Fault:
    """Gradients go through backward 2^-power times too small. Give the loss through `fault.loss` too."""
    return _through("fp16-underflow", model, steps, 2.0**power)


def _through(name: str, model: nn.Module, steps: Container[int], factor: float) -> Fault:
    def enlarge(slope: Tensor) -> Tensor:
        return slope * factor

    def reduce(gradient: Tensor) -> Tensor:
        return gradient / factor

    def change_loss(_: int, loss: Tensor) -> Tensor:
        same = loss.clone()
        same.register_hook(enlarge)  # type: ignore[no-untyped-call]
        return same

    return Fault(
        name=name,
        steps=steps,
        change_loss=change_loss,
        around=lambda _: hooked((p, reduce) for p in trained(model)),
    )
