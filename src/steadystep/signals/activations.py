"""Dead and saturated units, seen through forward hooks that exist only while a sampled step runs forward.

Only modules can be watched: a model that calls `torch.nn.functional.relu` shows nothing here, nor does a compiled one.
LeakyReLU and ELU are left out because a gradient always passes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadystep.signals.hooks import numbers_may_leave, open_modules, spread

_DIE = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU)
_SATURATE = (nn.Tanh, nn.Sigmoid)
_MOST = 64
_CALLS = 4  # of one module in one forward pass: blocks share a ReLU, a recurrent cell repeats itself for ever
_FEWEST = 16  # values per unit: with fewer, a healthy unit that is often silent looks dead


@final
class Activations:
    """Watches activation modules during one forward pass and keeps two numbers of each, on its device.

    A hook can never break the forward pass: a module whose output cannot be measured is left out from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._left_out: set[str] = set()
        self._seen: list[tuple[str, Tensor]] = []

    def start(self) -> None:
        """Put the hooks in place; what was seen before is forgotten."""
        self.clear()
        for name, module in spread(self._watchable(), _MOST):
            self._handles.append(module.register_forward_hook(self._hook(name)))

    def stop(self) -> None:
        """Take the hooks away; what they saw stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def clear(self) -> None:
        """Take the hooks away and forget what they saw."""
        self.stop()
        self._seen = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks for the forward pass inside."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    @property
    def modules(self) -> tuple[str, ...]:
        """What was seen; a module that ran several times comes with a number."""
        return tuple(name for name, _ in self._seen)

    def pending(self) -> list[Tensor]:
        """One flat tensor for the next host read: dead and saturated share of each of `modules`; or none."""
        if not self._seen:
            return []
        device = self._seen[0][1].device
        return [torch.cat([numbers.to(device) for _, numbers in self._seen])]

    @staticmethod
    def read(values: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Dead and saturated shares, from the numbers of `pending`."""
        return tuple(values[::2]), tuple(values[1::2])

    def _watchable(self) -> list[tuple[str, nn.Module]]:
        kinds = _DIE + _SATURATE
        return [(n, m) for n, m in open_modules(self._model) if isinstance(m, kinds) and n not in self._left_out]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        calls = 0

        def look(module: nn.Module, _: Any, output: Any) -> None:
            nonlocal calls
            if not numbers_may_leave():
                return
            calls += 1
            if calls > _CALLS or len(self._seen) == _MOST:
                return
            try:
                numbers = _measure(module, output)
            except Exception:
                self._left_out.add(name)
                return
            if numbers is not None:
                self._seen.append((name if calls == 1 else f"{name} ({calls})", numbers))

        return look


@torch.no_grad()
def _measure(module: nn.Module, output: Tensor) -> Tensor | None:
    """[dead share, saturated share] of one output; None when there is nothing to count."""
    values = output.detach()
    if not values.numel() or values.dim() < 2:
        return None
    if isinstance(module, _DIE):
        unit = 1 if values.dim() > 3 else values.dim() - 1
        if values.numel() < _FEWEST * values.shape[unit]:
            return None
        others = [d for d in range(values.dim()) if d != unit]
        dead = ((values.amax(others) <= 0) & (values.amin(others) >= 0)).float().mean()
        return torch.stack((dead, torch.zeros_like(dead)))
    flat = values.abs() > 0.99 if isinstance(module, nn.Tanh) else (values - 0.5).abs() > 0.49
    saturated = flat.float().mean()
    return torch.stack((torch.zeros_like(saturated), saturated))
