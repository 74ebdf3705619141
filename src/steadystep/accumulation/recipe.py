"""A closure that can be run again later and still means the same batch.

`for x, y in loader: guard.step(lambda: loss_fn(model(x), y))` has a trap: the lambda looks `x` up when it runs, and by
the end of an accumulation group `x` is another batch. So the names a closure reads are bound to what they held when
it was given. Random numbers are drawn again from the same state, so that dropout repeats too.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

Closure = Callable[..., Tensor]


@final
class RngState:
    """torch's random state on the host and on one device, as it is now."""

    __slots__ = ("_cpu", "_device", "_on_device")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._cpu)
        if self._on_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device, self._device)


@final
class Recipe:
    """One micro-batch's forward pass, repeatable."""

    __slots__ = ("_batch", "_bound", "_given", "_rng")

    def __init__(self, closure: Closure, batch: Any, *, device: torch.device) -> None:
        self._given = closure
        self._bound = _bindings(closure)
        self._batch = batch
        self._rng = RngState(device)

    def run_again(self) -> Tensor:
        """The loss of the same batch with the same random numbers."""
        self._rng.restore()
        closure = _rebuilt(self._given, *self._bound) if self._bound else self._given
        return closure() if self._batch is None else closure(self._batch)


def _bindings(closure: Closure) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a plain function reads from around it, now; None for callables that carry their own state."""
    if not isinstance(closure, types.FunctionType):
        return None
    cells = tuple(_content(cell) for cell in closure.__closure__ or ())
    names = set(_names_read(closure.__code__))
    return cells, {name: closure.__globals__[name] for name in names if name in closure.__globals__}


def _rebuilt(closure: Closure, cells: tuple[Any, ...], global_names: dict[str, Any]) -> Closure:
    assert isinstance(closure, types.FunctionType)
    twin = types.FunctionType(
        closure.__code__,
        {**closure.__globals__, **global_names},
        closure.__name__,
        closure.__defaults__,
        tuple(types.CellType(*content) for content in cells),
    )
    twin.__kwdefaults__ = closure.__kwdefaults__
    return twin


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
