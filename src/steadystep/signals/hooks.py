"""What hooks on a user's modules have to mind."""

import sys
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

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


def spread(items: Sequence[Named], most: int) -> list[Named]:
    """At most so many of them, evenly chosen from first to last."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
