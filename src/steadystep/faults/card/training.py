"""What a scorecard needs to know about a training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

    It has `model`, `optimizer` and `loss(batch)`; `batches(step)`, or `batch()` for the next one; and if it likes
    `score()` (or `held_out()`) and `after_step()`. Without a score of its own, it is the mean loss of the batches
    behind the last step.
    """
    lacking = [name for name in ("model", "optimizer", "loss") if getattr(thing, name, None) is None]
    batch: Any = getattr(thing, "batches", None)
    following: Any = getattr(thing, "batch", None)
    if not callable(batch):
        batch = (lambda _: following()) if callable(following) else None
    if lacking or batch is None:
        lacking += ["batches(step)"] if batch is None else []
        raise MisuseError(f"the factory returned a {type(thing).__name__} without {', '.join(lacking)}")

    own = getattr(thing, "score", None) or getattr(thing, "held_out", None)

    def score(steps: int) -> float:
        with _evaluating(thing.model):
            if callable(own):
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


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
