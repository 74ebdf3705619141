"""Experiments with a guarded run: its own loss and batches, and one story with what it has shown so far."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.config import Config
from steadystep.engine.parts import Parts
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.examination import Examination, examine
from steadystep.optimizers import CombinedOptimizer

_MOST = 64  # remembered batches


def examine_guarded(
    parts: Parts,
    model: nn.Module,
    optimizer: Optimizer | None,
    config: Config,
    batches: Iterable[Any] | None,
    loss: Callable[[Any], Tensor] | None,
    options: Mapping[str, Any],
) -> Examination:
    """See `Guard.examine`."""
    if parts.ranks.size > 1:
        raise UnsupportedError("examine works in a single process: run it on one rank without the others")
    if optimizer is None or isinstance(optimizer, CombinedOptimizer):
        raise UnsupportedError("examine needs a guard with one optimizer: call steadystep.examine for each of them")
    remembered = parts.recovery.remembered(_MOST)
    if loss is None:
        if not remembered:
            raise MisuseError(
                "examine has no loss: pass loss=, a function of a batch, or train with step(f, batch=...)"
            )
        loss = remembered[-1].closure
    if batches is None:
        batches = [recipe.batch for recipe in remembered]
        if not batches:
            raise MisuseError("examine has no batches: pass your loader, or train with guard.step(closure, batch=...)")
    compute = loss

    def under_precision(batch: Any) -> Tensor:
        with parts.precision.autocast():
            return compute(batch)

    settings = {"max_grad_norm": config.training.max_grad_norm, **options}
    done = examine(model, optimizer, under_precision, batches, **settings)
    parts.progress.examined = (parts.progress.attempts, done.causes)
    return replace(done, causes=parts.diagnose())
