"""A closure that can be run again later and still means the same batch.

`for x, y in loader: guard.step(lambda: loss_fn(model(x), y))` has a trap: the lambda looks `x` up when it runs, and by
the end of an accumulation group `x` is another batch. So the names a closure reads, and those that functions of the
same module read for it, are bound to what they held when it was given. Random numbers are drawn again from the same
state, so that dropout repeats too. What cannot be bound (an attribute, a buffer that is filled anew) shows itself by
another loss.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.rng import RngState
from steadystep.errors import MisuseError
from steadystep.optimizers import Trained

Closure = Callable[..., Tensor]


@final
class RepeatableClosure:
    """One micro-batch's forward pass, repeatable."""

    __slots__ = ("_bindings", "batch", "closure", "rng")

    def __init__(self, closure: Closure, batch: Any, rng: RngState) -> None:
        self.closure = closure
        self._bindings = _Bindings(closure) if isinstance(closure, types.FunctionType) else None
        self.batch = batch
        self.rng = rng
        """Before the forward pass."""

    def again(self) -> tuple[Closure, Any]:
        """The closure and its batch as they were given, with the random numbers put back to that moment."""
        self.rng.restore()
        return self.bound()

    def bound(self) -> tuple[Closure, Any]:
        """The closure and its batch as they were given."""
        return self._bindings.twin() if self._bindings else self.closure, self.batch


@final
class BatchClosure:
    """As a recipe, for a closure that gets its data as `batch=`: nothing is bound, so it costs nothing to keep."""

    __slots__ = ("batch", "closure", "rng")

    def __init__(self, closure: Closure, batch: Any, rng: RngState | None) -> None:
        self.closure, self.batch, self.rng = closure, batch, rng

    def again(self) -> tuple[Closure, Any]:
        """The closure and its batch, with the random numbers put back where they are known to matter."""
        if self.rng is not None:
            self.rng.restore()
        return self.closure, self.batch


@final
class TapedClosure:
    """As a recipe, for a forward pass that a loop made itself: `batch` is what is held in memory for it."""

    __slots__ = ("batch", "beginning", "closure")
    rng: None = None
    """The loop has drawn what it draws, and perhaps its next batch: it goes on with the numbers of now."""

    def __init__(self, closure: Closure, batch: Any, beginning: RngState | None) -> None:
        self.closure, self.batch, self.beginning = closure, batch, beginning

    def again(self) -> tuple[Closure, Any]:
        """The pass, with the random numbers put back to its beginning."""
        if self.beginning is not None:
            self.beginning.restore()
        return self.closure, None


@final
class _Bindings:
    """What a function reads from around it, now, and so for the functions of its module that it can reach."""

    __slots__ = ("_cells", "_root", "_values")

    def __init__(self, function: types.FunctionType) -> None:
        self._root = function
        self._cells: dict[types.FunctionType, tuple[tuple[Any, ...], ...]] = {}
        self._values: dict[str, Any] = {}
        self._bind(function)

    def _bind(self, function: types.FunctionType) -> None:
        if function in self._cells or function.__globals__ is not self._root.__globals__:
            return
        contents = tuple(_content(cell) for cell in function.__closure__ or ())
        self._cells[function] = contents
        space = function.__globals__
        names = {name: space[name] for name in _names_read(function.__code__) if name in space}
        self._values.update(names)
        for value in (*(value for content in contents for value in content), *names.values()):
            if isinstance(value, types.FunctionType):
                self._bind(value)

    def twin(self) -> types.FunctionType:
        """The function again, reading the bound values."""
        space = dict(self._root.__globals__)
        twins = {function: _hollow(function, space) for function in self._cells}
        for function, contents in self._cells.items():
            for cell, content in zip(twins[function].__closure__ or (), contents, strict=True):
                if content:
                    cell.cell_contents = _twin_or_self(content[0], twins)
        space.update({name: _twin_or_self(value, twins) for name, value in self._values.items()})
        return twins[self._root]


def _hollow(function: types.FunctionType, space: dict[str, Any]) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    twin = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _twin_or_self(value: Any, twins: dict[types.FunctionType, types.FunctionType]) -> Any:
    return twins.get(value, value) if isinstance(value, types.FunctionType) else value


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _names_read(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_read(constant)


_TOUCHED = (
    "the closure called backward or zero_grad itself: return the loss, and leave backward, clipping, the step and "
    "zero_grad to the guard"
)


@final
class OnlyTheLoss:
    """A context around the closure; as cheap as two entries of a dictionary."""

    def __init__(self, optimizer: Optimizer, trained: Trained) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._step: Any = None
        self._marks: tuple[int | None, int | None] = (None, None)

    def __enter__(self) -> None:
        # why not a hook: it would stay, and torch steps more slowly with one
        self._step = self._optimizer.__dict__.get("step")
        self._optimizer.__dict__["step"] = _refuse
        self._marks = self._now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._step is None:
            del self._optimizer.__dict__["step"]
        else:
            self._optimizer.__dict__["step"] = self._step
        if kind is None and self._now() != self._marks:
            raise MisuseError(_TOUCHED)

    def _now(self) -> tuple[int | None, int | None]:
        """A gradient's counter moves when something is added to it; the first and the last stand for all."""
        parameters = self._trained.parameters
        first, last = parameters[0].grad, parameters[-1].grad
        return None if first is None else first._version, None if last is None else last._version


def _refuse(*_: object, **__: object) -> NoReturn:
    raise MisuseError("the closure called optimizer.step itself: return the loss and leave the step to the guard")


_ON_META = "the loss is on the meta device and holds no number: give the model and the batch a real device"


def called(work: Closure, batch: Any) -> Any:
    """What the closure returns for its batch; a closure that cannot be called so is the caller's mistake."""
    try:
        return work() if batch is None else work(batch)
    except TypeError as error:
        trace = error.__traceback__
        inside = trace is not None and trace.tb_next is not None
        if inside and not isinstance(work, nn.Module):  # the closure's own error
            raise
        what = "the model" if isinstance(work, nn.Module) else "a closure that cannot be called so"
        how = "guard.step(lambda: loss_fn(model(x), y)), or guard.step(lambda batch: ..., batch=batch)"
        raise MisuseError(f"step() was given {what} ({error}): give one that computes the loss, {how}") from error


def checked_loss(loss: Any) -> Tensor:
    """One real number with a graph, or an error that says what to return instead."""
    if not isinstance(loss, Tensor):
        raise MisuseError(f"the closure returned {type(loss).__name__}, expected the loss as a tensor of one element")
    if loss.numel() != 1 or not loss.is_floating_point():
        shape = "x".join(str(n) for n in loss.shape)
        raise MisuseError(
            f"the loss must be one real number, got a {loss.dtype} tensor of shape [{shape}]: take its mean"
        )
    if not loss.requires_grad:
        raise MisuseError(
            "the loss has no graph to differentiate: was it computed under no_grad, detached, turned into a number, or "
            "is every parameter frozen? Give the loss as the model's output makes it"
        )
    if loss.is_meta:
        raise MisuseError(_ON_META)
    return loss


_FIRST, _EVERY = 8, 256  # passes


@final
class Draws:
    """`before` and `after` each pass. A state is given where it is known, or still has to be found out, to matter."""

    __slots__ = ("_count", "_device", "_numpy", "_python", "_torch", "looked_at")

    def __init__(self, device: torch.device, *, by_modules: bool) -> None:
        self._device = device
        self._torch, self._python, self._numpy = by_modules, False, False
        self._count = 0
        self.looked_at: RngState | None = None
        """What the pass at hand began with, while it is to be found out whether that matters."""

    def before(self) -> RngState | None:
        """What the pass begins with."""
        self._count += 1
        if self._count <= _FIRST or self._count % _EVERY == 0:
            self.looked_at = RngState(self._device, python=True, numpy=True)
            return self.looked_at
        if self._torch or self._python or self._numpy:
            return RngState(self._device, python=self._python, numpy=self._numpy)
        return None

    def after(self, *, last: bool = False) -> None:
        """The pass is over; `last` says that its update is too."""
        if self.looked_at is not None:
            drawn, python, numpy = self.looked_at.moved()
            self._torch, self._python, self._numpy = self._torch or drawn, self._python or python, self._numpy or numpy
            self.looked_at = None if last else self.looked_at
