"""Dead and saturated units, seen through forward hooks that exist only while a sampled step runs forward.

Only modules can be watched: a model that calls `torch.nn.functional.relu` shows nothing here, nor does a compiled one.
LeakyReLU and ELU are left out because a gradient always passes.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

Named = TypeVar("Named")


def open_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with a name each; none when one of them is compiled."""
    found = []
    for name, module in model.named_modules():
        # why: hooks under a compiled module are not run, and must not be traced
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            return []
        found.append((name or type(module).__name__, module))
    return found


def numbers_may_leave() -> bool:
    """False inside a compiled function or a torch.func transform: no number must get out of these."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None


def compiles() -> bool:
    """Whether something is compiled in this process: what it traces must not be replaced, nor stand on a stack."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # why both: `torch.compile` with `fullgraph` counts no frames, and one that is under way has no backend yet
    backends = getattr(frames, "cached_backends", {})
    return bool(dynamo.counters["frames"]) or any(backend is not None for backend in backends.values())


_modes: Any = torch.overrides


def take_off(mode: TorchFunctionMode) -> None:
    """Take a mode from torch's stack. Modes that the loop has entered since stay."""
    above = []
    while torch._C._len_torch_function_stack():
        top = _modes._pop_mode()
        if top is mode:
            break
        above.append(top)
    for each in reversed(above):
        _modes._push_mode(each)


def evenly_chosen(items: Sequence[Named], most: int) -> list[Named]:
    """At most so many of them, evenly chosen from first to last."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


_DIE = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU)
_SATURATE = (nn.Tanh, nn.Sigmoid)
_MOST = 64
_CALLS = 4  # of one module in one forward pass: blocks share a ReLU, a recurrent cell repeats itself for ever
_FEWEST = 16  # values per unit: with fewer, a healthy unit that is often silent looks dead


class ForwardHooks(ABC):
    """Hooks in a model for one forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._left_out: set[str] = set()

    @abstractmethod
    def start(self) -> None:
        """Put the hooks in place; what was seen before is forgotten."""

    def stop(self) -> None:
        """Take the hooks away; what they saw stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_pass(self, tell: Callable[..., None]) -> RemovableHandle | None:
        """Tell of the next forward passes; None where hooks would not be called."""
        return self._model.register_forward_pre_hook(SilentHook(tell)) if open_modules(self._model) else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks for the forward pass inside."""
        self.start()
        try:
            yield
        finally:
            self.stop()


@final
class Activations(ForwardHooks):
    """Watches activation modules during one forward pass and keeps two numbers of each, on its device.

    A hook can never break the forward pass: a module whose output cannot be measured is left out from then on.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._seen: list[tuple[str, bool, Tensor]] = []

    def start(self) -> None:
        """Put the hooks in place; what was seen before is forgotten."""
        self.clear()
        for name, module in evenly_chosen(self._watchable(), _MOST):
            self._handles.append(module.register_forward_hook(SilentHook(self._hook(name))))

    def clear(self) -> None:
        """Take the hooks away and forget what they saw."""
        self.stop()
        self._seen = []

    @property
    def modules(self) -> tuple[str, ...]:
        """What was seen; a module that ran several times comes with a number."""
        return tuple(name for name, _, _ in self._seen)

    def pending(self) -> list[Tensor]:
        """One flat tensor for the next host read: dead and saturated share of each of `modules`; or none."""
        if not self._seen:
            return []
        home = self._seen[0][2].device
        none = torch.zeros((), device=home)
        shares = [(dead, share.to(home)) for _, dead, share in self._seen]
        return [torch.stack([each for dead, share in shares for each in ((share, none) if dead else (none, share))])]

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
                share = _measure(module, output)
            except Exception:
                self._left_out.add(name)
                return
            if share is not None:
                self._seen.append((name if calls == 1 else f"{name} ({calls})", isinstance(module, _DIE), share))

        return look


@torch.no_grad()
def _measure(module: nn.Module, output: Tensor) -> Tensor | None:
    """The share of one output that is dead, or saturated; None when there is nothing to count."""
    values = output.detach()
    if not values.numel() or values.dim() < 2:
        return None
    if isinstance(module, _DIE):
        unit = 1 if values.dim() > 3 else values.dim() - 1
        if values.numel() < _FEWEST * values.shape[unit]:
            return None
        others = [d for d in range(values.dim()) if d != unit]
        return ((values.amax(others) <= 0) & (values.amin(others) >= 0)).mean(dtype=torch.float32)
    flat = values.abs() > 0.99 if isinstance(module, nn.Tanh) else (values - 0.5).abs() > 0.49
    return flat.mean(dtype=torch.float32)


@final
class SilentHook:
    """Stays behind when the model is copied or saved, is not compiled, and raises nothing into the loop."""

    def __init__(self, tell: Callable[..., None] | None = None) -> None:
        self._tell = tell

    def __call__(self, *args: Any) -> None:
        """Pass on what the hook was called with."""
        if self._tell is not None and not torch.compiler.is_compiling():
            try:
                self._tell(*args)
            except Exception:  # why: a pass that cannot be remembered is still the loop's pass
                return

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Inside, nothing is passed on."""
        tell, self._tell = self._tell, None
        try:
            yield
        finally:
            self._tell = tell

    def __deepcopy__(self, _: Any) -> "SilentHook":
        return SilentHook()

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # why: takes anything, does nothing, and loads without this package


def is_ours(depth: int) -> bool:
    """Whether a hook of this package made the call."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("steadystep.")
