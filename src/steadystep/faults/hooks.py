"""Hooks on gradients that last for one step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

GradientHook = Callable[[Tensor], Tensor | None]


@contextmanager
def hooked(pairs: Iterable[tuple[nn.Parameter, GradientHook]]) -> Iterator[None]:
    """Each hook sees its parameter's gradient in every backward pass until the end, and may replace it.

    It comes before the gradient is added up or, in a distributed run, averaged: what one rank does reaches all.
    """
    handles = [parameter.register_hook(hook) for parameter, hook in pairs]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that can have a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
