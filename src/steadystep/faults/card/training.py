"""What a scorecard needs to know about a training."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.errors import MisuseError

_UNSEEN = 8  # batches behind the last step, for a training that brings no score of its own


def _nothing() -> None:
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, ready to go."""

    model: nn.Module
    optimizer: Optimizer
    batch: Callable[[int], Any]
    """The batch of a step, asked for in order."""
    loss: Callable[[Any], Tensor]
    score: Callable[[int], float]
    """After so many steps; lower is better."""
    after_step: Callable[[], Any] = _nothing


def adapted(thing: Any) -> Training:
    """What a factory returned, in one shape.

    It has `model`, `optimizer` and `loss(batch)`; `batches(step)`, `batches` as a loader that is gone through again and
    again, or `batch()` for the next one; and if it likes `score()` (or `held_out()`, or `validate()`) and
    `after_step()`. What `steadystep train` takes will do. Without a score of its own, it is the mean loss of the
    batches behind the last step.
    """
    lacking = [name for name in ("model", "optimizer", "loss") if getattr(thing, name, None) is None]
    batch: Any = getattr(thing, "batches", None)
    following: Any = getattr(thing, "batch", None)
    if not callable(batch):
        if batch is not None:
            following = partial(next, _again_and_again(batch))
        batch = (lambda _: following()) if callable(following) else None
    if lacking or batch is None:
        lacking += ["batches(step)"] if batch is None else []
        raise MisuseError(f"the factory returned a {type(thing).__name__} without {', '.join(lacking)}")

    scores = (getattr(thing, name, None) for name in ("score", "held_out", "validate"))
    own = next((score for score in scores if callable(score)), None)

    def score(steps: int) -> float:
        with _evaluating(thing.model):
            if own is not None:
                return float(own())  # sync: once a run
            losses = [thing.loss(batch(steps + i)).detach().double().reshape(()) for i in range(_UNSEEN)]
            return float(torch.stack(losses).mean())  # sync: once a run

    return Training(
        model=thing.model,
        optimizer=thing.optimizer,
        batch=batch,
        loss=thing.loss,
        score=score,
        after_step=getattr(thing, "after_step", None) or _nothing,
    )


def _again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
