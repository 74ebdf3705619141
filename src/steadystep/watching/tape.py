"""A loop's forward pass and what it made of it until `backward`, in a form that can be run again.

The model's inputs are known from a hook. What the loop does with its outputs (a loss function, a division, a view) is
seen by a torch function mode between the end of the forward pass and `backward`: each function with its arguments,
where one that came from the model stands for the place it came from. References to inputs and targets are all that is
kept; outputs and graphs are not.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from steadystep._utils.rng import RngState
from steadystep._utils.tree import held_in, mapped
from steadystep.signals.activations import compiles, take_off
from steadystep.signals.loss_calls import LossRecorder

_MOST = 64  # functions between forward and backward: beyond that it is another network, and it costs
_MOST_CALLS = 1024  # of all kinds: `zero_grad` reads and writes the gradient of each parameter
_modes: Any = torch.overrides
_Cast = torch.dtype | None


class NotRepeatableError(Exception):
    """It is not what it was: an input has been written over since."""


@final
class _Place:  # why no tuple: what holds places is opened as a container is
    """The tensor that is number so many on the tape."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@final
class _Call(NamedTuple):  # why no dataclass: a frozen one takes five times as long to make
    """What the loop has called, with places for tensors that came from the model."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    grad: bool
    cast: _Cast


@final
class Tape:
    """One forward pass. Open until `close`, which says what backward is called on."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rng: RngState | None,
        device: str,
        owns: Callable[[Tensor], bool],
    ) -> None:
        self._model, self.args, self.kwargs, self.rng = model, args, kwargs, rng
        self._device = device
        self._owns = owns
        self._cast = _cast_of(device)
        self._calls: list[_Call] = []
        self._outside: list[Tensor] = []
        self._inputs = 0
        self._versions: list[int] = []
        self._teachers: list[tuple[Tensor, int]] = []
        """Weights of other networks that were asked without gradients, and their versions then."""
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._loss: int | None = None
        self.whole = True
        """Everything that led to the loss was seen."""
        for part in [*_tensors_in(args), *_tensors_in(kwargs)] if kwargs else _tensors_in(args):
            if part.requires_grad:  # it comes from another network, or gradients are wanted of it
                self.whole = False
            self._know(part)
        self._inputs = len(self._outside)

    @property
    def held(self) -> Any:
        """What is kept in memory for it."""
        return (self.args, self.kwargs, self._outside[self._inputs :])

    def forwarded(self, output: Any) -> None:
        """The forward pass has ended."""
        for part in _tensors_in(output):
            self._add(part)

    def saw(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """The loop has called a function of torch."""
        made = _tensors_in(result)
        writes = _name(function) in _WRITING
        if not made and not writes:
            return
        if not writes and self._is_given(function, args, kwargs):
            return
        if len(self._calls) >= _MOST or (writes and id(args[0]) not in self._numbers):
            self.whole = False
        if not self.whole:
            return
        args, kwargs = mapped((args, kwargs), self._placed)
        call = _Call(function, args, kwargs, torch.is_grad_enabled(), _cast_of(self._device))
        self._calls.append(call)
        for part in made:
            self._add(part)

    def close(self, loss: Tensor) -> bool:
        """Backward is called on `loss`. False: it cannot be run again."""
        self._loss = self._numbers.get(id(loss))
        self._alive, self._numbers = [], {}
        self.whole = self.whole and self._loss is not None and not self._written_over
        return self.whole

    def run(self, _: Any = None) -> Tensor:
        """The loss once more, from the inputs of then and the weights of now."""
        if self._written_over or self._loss is None:
            raise NotRepeatableError
        with _casting(self._device, self._cast):
            values = _tensors_in(self._model(*self.args, **self.kwargs))
        for call in self._calls:
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(call.grad))
                stack.enter_context(_casting(self._device, call.cast))
                args, kwargs = mapped((call.args, call.kwargs), lambda place: values[place.number], _Place)
                values.extend(_tensors_in(call.function(*args, **kwargs)))
        return values[self._loss]

    @property
    def _written_over(self) -> bool:
        changed = any(part._version != version for part, version in self._teachers)
        return changed or [part._version for part in self._outside] != self._versions

    def _is_given(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """What a teacher says of the inputs alone, without gradients: given, as targets are, while it stays as it is.

        Random numbers are drawn again with the loss, or what comes after them would be drawn from another state.
        """
        if torch.is_grad_enabled() or _draws(function, args, kwargs):
            return False
        parts = _tensors_in((args, kwargs))
        if not parts or any(id(part) in self._numbers or self._owns(part) for part in parts):
            return False
        self._teachers += [(part, part._version) for part in parts if part.requires_grad]
        return True

    def _add(self, part: Tensor) -> None:
        self._numbers[id(part)] = len(self._alive)
        self._alive.append(part)

    def _know(self, part: Tensor) -> None:
        """A tensor from outside. A parameter is meant to change; anything else must stay what it is."""
        if part.grad_fn is not None or part.is_inference():
            self.whole = False
        elif not part.requires_grad:
            self._outside.append(part)
            self._versions.append(part._version)
        elif not self._owns(part):
            self.whole = False

    def _placed(self, part: Tensor) -> _Place | Tensor:
        number = self._numbers.get(id(part))
        if number is not None:
            return _Place(number)
        self._know(part)
        return part


@final
class TapeMode(TorchFunctionMode):
    """Tells a tape what is called. On torch's stack from the end of a forward pass to backward."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        tape = self._tape
        if tape.whole and getattr(function, "__self__", None) is not _GRAD:
            try:
                tape.saw(function, args, kwargs, result)
            except Exception:  # whatever is odd about this call, it is the loop's, and was made
                tape.whole = False
        self._count += 1
        if self._count > _MOST_CALLS:
            self._tape.whole = False
        return result

    def push(self) -> bool:  # type: ignore[override]
        """Begin to listen; not inside somebody else's mode, nor where loss functions are compiled."""
        if torch._C._len_torch_function_stack() > _default_modes() or compiles():
            return False
        _modes._push_mode(self)
        return True

    def pop(self) -> None:
        """End it. Modes that the loop has entered since stay."""
        take_off(self)


_GRAD = torch.Tensor.grad
_DRAWING = ("rand", "bernoulli", "normal", "poisson", "exponential", "uniform", "multinomial")
_WRITING = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"))


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return "__setitem__" if name.endswith("_") and not name.endswith("__") else name


def _draws(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether it takes random numbers; dropout in evaluation mode does not."""
    name = getattr(function, "__name__", "")
    if "dropout" in name:
        return bool(kwargs.get("training", args[2] if len(args) > 2 else True))
    return any(word in name for word in _DRAWING)


def _default_modes() -> int:
    """Modes that are the process's own, as `torch.set_default_device` enters one, or this package's."""
    if not torch._C._len_torch_function_stack():
        return 0
    own = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None
    return int(own) + LossRecorder.at_work


def _cast_of(device: str) -> _Cast:
    """What autocast casts to; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _casting(device: str, cast: _Cast) -> Any:
    return torch.autocast(device, dtype=cast, enabled=cast is not None)


def _tensors_in(tree: Any) -> list[Tensor]:
    """In an order that is the same each time."""
    return [tree] if isinstance(tree, Tensor) else list(held_in(tree))  # why apart: nearly always it is one tensor
