"""Where the losses of the sweep come from: a closure, or batches with a loss function."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steadystep.errors import MisuseError

LossFn = Callable[[Any, Any], Tensor]
Source = Callable[[], Tensor] | Iterable[Any]


def losses_from(source: Source, model: nn.Module, loss_fn: LossFn | None) -> Iterator[Tensor]:
    """An endless supply of losses, one per step."""
    if isinstance(source, Iterable):
        if loss_fn is None:
            raise MisuseError("with a loader find_lr needs loss_fn=, called as loss_fn(model(x), y); or give a closure")
        return _from_batches(source, model, loss_fn)
    if not callable(source):
        raise MisuseError(f"expected a closure or an iterable of (x, y) batches, got {type(source).__name__}")
    if loss_fn is not None:
        raise MisuseError("loss_fn is for a loader: a closure returns the loss itself")
    return _from_closure(source)


def _from_closure(closure: Callable[[], Tensor]) -> Iterator[Tensor]:
    while True:
        yield _checked(closure())


def _from_batches(batches: Iterable[Any], model: nn.Module, loss_fn: LossFn) -> Iterator[Tensor]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    seen = 0
    while True:
        before = seen
        for batch in batches:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise MisuseError(f"a batch must be a pair (x, y), got {type(batch).__name__}: give a closure instead")
            x, y = (item.to(device) if isinstance(item, Tensor) else item for item in batch)
            seen += 1
            yield _checked(loss_fn(model(x), y))
        if seen == before:
            raise MisuseError(
                f"the batches ended after {seen} and cannot be started again: give the loader itself, not an iterator "
                "over it, or lower num_steps"
            )


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise MisuseError(f"the loss must be a tensor of one real number, got {type(loss).__name__}: take its mean")
    if not loss.requires_grad:
        raise MisuseError("the loss has no graph to differentiate: was it detached or turned into a number?")
    return loss
