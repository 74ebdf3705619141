"""Flipped and stuck bits: of what is stored (weights, moments, buffers) and of what is being computed."""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.text import nearest_names
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.faults import options as read
from steadystep.faults.fault import Element, Fault, draw, hooked, pick
from steadystep.faults.options import Option

BitTarget = Literal["weight", "moment", "buffer", "gradient", "activation", "matmul"]
Bit = int | Literal["any", "sign", "exponent", "mantissa"] | None

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
Change = Callable[[int, Tensor], None]

OPTIONS: Mapping[str, Option] = {
    "bit": Option(
        read=read.bit,
        default=None,
        about="bit number from the lowest, 'top' of the exponent, or drawn from 'sign', 'exponent', 'mantissa', 'any'",
    ),
    "target": Option(
        read=read.one_of(*get_args(BitTarget)),
        default="weight",
        about="weight, moment, buffer, gradient, activation or matmul",
    ),
    "stuck": Option(read=read.stuck_at, default=None, about="0 or 1: set the bit to this instead of flipping it"),
    "transient": Option(
        read=read.switch, default=False, about="of a gradient, activation or matmul: the first computation only"
    ),
}
"""Of a declared bit-flip, beside `parameter` and `element`."""


def flipped_bit(
    model: nn.Module,
    *,
    steps: Container[int],
    parameter: str | int | None = 0,
    element: int | None = 0,
    bit: Bit = None,
    seed: int = 0,
    target: BitTarget = "weight",
    stuck: int | None = None,
    transient: bool = False,
    optimizer: Optimizer | None = None,
) -> Fault:
    """Flip one bit: of a weight, a moment or a buffer before the step, where it stays; or while the step is computed.

    Args:
        model: the model.
        steps: the steps it happens at.
        parameter: name or position of the parameter, buffer or module (activation, matmul); None draws it from `seed`
            and the step.
        element: position in the tensor; None draws it.
        bit: position of the bit; "any", "sign", "exponent" and "mantissa" draw it from these. Default: the top bit of
            the exponent, which makes any number below 2 huge (or, from 1 on, infinite or NaN).
        seed: seed of the draws.
        target: what is hit. A gradient, the output of a module without children (activation) or of one with a matrix
            (matmul) is hit in every computation within the step.
        stuck: 0 or 1: the bit is set to this instead, as a failing cell or wire does.
        transient: of a gradient, activation or matmul only the first computation within a step is hit.
        optimizer: the optimizer whose state is hit, for moments.

    >>> model = nn.Linear(2, 1)
    >>> fault = flipped_bit(model, steps={5}, target="matmul", bit="sign")
    >>> before = model(torch.ones(1, 2))
    >>> with fault.at(5):
    ...     print(bool(model(torch.ones(1, 2)) == -before))
    True
    """

    def change(step: int, tensor: Tensor) -> None:
        number = draw(seed, step, "element", tensor.numel()) if element is None else element
        flip(tensor, number, _position(bit, tensor, seed, step), stuck=stuck)

    if target in ("activation", "matmul", "gradient"):
        return _in_flight(model, steps, parameter, change, seed, target=target, transient=transient)
    if transient:
        raise MisuseError(
            f"transient: a {target} is stored, and what is flipped stays; use gradient, activation or matmul"
        )
    place = Element(model, parameter=parameter, element=element, seed=seed) if target == "weight" else None
    if target == "buffer":
        _chosen(_buffers(model), parameter, seed, 0, what="floating-point buffer")

    @contextmanager
    def flipped(step: int) -> Iterator[None]:
        if place is not None:
            change(step, place.at(step)[0])
        elif target == "buffer":
            change(step, _chosen(_buffers(model), parameter, seed, step, what="floating-point buffer"))
        else:
            change(step, _chosen(_moments(model, optimizer), parameter, seed, step, what="moment"))
        yield

    return Fault(name="flipped-bit", steps=steps, around=flipped)


def _in_flight(
    model: nn.Module,
    steps: Container[int],
    which: str | int | None,
    change: Change,
    seed: int,
    *,
    target: str,
    transient: bool,
) -> Fault:
    modules = {} if target == "gradient" else _modules(model, matrices=target == "matmul")
    if target == "gradient":
        pick(model, 0 if which is None else which)
    else:
        _chosen(modules, which, seed, 0, what=target)

    @contextmanager
    def around(step: int) -> Iterator[None]:
        hit = _Hit(change, step, transient=transient)
        with ExitStack() as stack:
            if target == "gradient":
                count = sum(p.requires_grad for p in model.parameters())
                chosen = draw(seed, step, "parameter", count) if which is None else which
                stack.enter_context(hooked([(pick(model, chosen)[1], hit.gradient)]))
            else:
                module = _chosen(modules, which, seed, step, what=target)
                stack.callback(module.register_forward_hook(hit.output).remove)
            yield

    return Fault(name="flipped-bit", steps=steps, around=around)


@final
class _Hit:
    """Changes what is computed within one step, every time or only the first."""

    def __init__(self, change: Change, step: int, *, transient: bool) -> None:
        self._change, self._step, self._transient, self._over = change, step, transient, False

    def _hit(self, tensor: Tensor) -> None:
        if not self._over:
            self._change(self._step, tensor)
        self._over = self._transient

    def gradient(self, grad: Tensor) -> Tensor:
        spoilt = grad.clone()
        self._hit(spoilt)
        return spoilt

    def output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        first = next((t for t in (output if isinstance(output, tuple) else (output,)) if _is_real(t)), None)
        if first is not None:
            self._hit(first)


def _position(bit: Bit, tensor: Tensor, seed: int, step: int) -> int | None:
    if bit is None or isinstance(bit, int):
        return bit
    width = 8 * tensor.element_size()
    mantissa = _MANTISSA.get(tensor.dtype, 0)
    low, high = {"any": (0, width), "sign": (width - 1, width), "exponent": (mantissa, width - 1)}.get(
        bit, (0, mantissa)
    )
    return low + draw(seed, step, "bit", max(high - low, 1))


def _chosen(named: dict[str, Any], which: str | int | None, seed: int, step: int, *, what: str) -> Any:
    """By name or position; drawn where it is left open."""
    if not named:
        raise MisuseError(f"bit-flip: there is no {what} to hit")
    if which is None:
        which = draw(seed, step, "parameter", len(named))
    if isinstance(which, int) and -len(named) <= which < len(named):
        return list(named.values())[which]
    if which in named:
        return named[str(which)]
    raise MisuseError(f"no {what} {which!r} among {len(named)}{nearest_names(str(which), list(named))}")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if _is_real(buffer)}


def _moments(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """By the name of their parameter; of several the first that is as large as it."""
    held: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        slots = {} if optimizer is None else optimizer.state.get(parameter, {})
        fitting = [value for value in slots.values() if _is_real(value) and value.shape == parameter.shape]
        held |= {name: fitting[0]} if fitting else {}
    return held


def _modules(model: nn.Module, *, matrices: bool) -> dict[str, nn.Module]:
    """Those without children; with `matrices` those that multiply by one."""
    leaves = {name: module for name, module in model.named_modules() if not any(True for _ in module.children())}
    if not matrices:
        return leaves
    return {
        name: module
        for name, module in leaves.items()
        if not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False))
    }


@torch.no_grad()
def flip(tensor: Tensor, element: int, bit: int | None = None, *, stuck: int | None = None) -> None:
    """Flip one bit in place, counted from the lowest; None is the top bit of the exponent. `stuck`: set it to that."""
    size = tensor.element_size()
    if not tensor.is_floating_point() or size not in _WHOLE:
        raise UnsupportedError(f"bits can be flipped in real numbers of 2, 4 or 8 bytes; this is {tensor.dtype}")
    which = size * 8 - 2 if bit is None else bit
    if not 0 <= which < size * 8:
        raise UnsupportedError(f"no bit {which} in a number of {size} bytes")
    bits = tensor.data.view(_WHOLE[size])
    where = torch.unravel_index(torch.tensor(element % tensor.numel()), bits.shape)
    if stuck is None or int(bits[where]) >> which & 1 != stuck:
        bits[where] ^= 1 << which
