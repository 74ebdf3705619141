"""Adapters for frameworks that own the loop. Each is thin: it finds the parts, `watch` does the rest.

Shared here: forward passes of a model that computes its own loss, kept so that a bad one can be run again.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep._utils.rng import RngState
from steadystep._utils.text import install
from steadystep.config import Config
from steadystep.engine.microbatch_group import draws
from steadystep.errors import MisuseError
from steadystep.records import Outcome
from steadystep.watching import Watcher


@final
class ForwardPasses:
    """Keeps references to the inputs of the current step, and the random state where the model draws random numbers.

    Args:
        model: the model.
        watcher: told how the loss could be computed again.
    """

    def __init__(self, model: nn.Module, watcher: Watcher) -> None:
        self._model = model
        self._watcher = watcher
        self._device = next(model.parameters()).device
        self._draws = draws(model)
        self._again = False
        self._handle = model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()

    def _seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and not self._again:
            rng = RngState(self._device) if self._draws else None
            self._watcher.could_rerun(self._run, {"args": args, **kwargs} if args else kwargs, rng)

    def _run(self, batch: dict[str, Any]) -> Tensor:
        self._again = True
        try:
            inputs = dict(batch)
            return _loss_in(self._model(*inputs.pop("args", ()), **inputs))
        finally:
            self._again = False


def _loss_in(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(loss, Tensor):
        raise MisuseError("the model does not return its loss")
    return loss


def install_line(package: str, extra: str, error: ImportError) -> ImportError:
    """Return the error to raise instead: what is missing and how to install it."""
    return ImportError(f"this needs {package}: {install(extra)} ({error})")


def without_sinks(config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """Return the settings, without sinks unless they name some: the framework has its own loggers."""
    settings = Config.load(config)
    if settings.monitoring.sinks is not None:
        return settings
    return settings.model_copy(update={"monitoring": settings.monitoring.model_copy(update={"sinks": ()})})


@final
class StepCounts:
    """Counts outcomes and keeps the numbers of the last one."""

    def __init__(self) -> None:
        self._refused = self._rollbacks = self._clipped = self._incidents = 0
        self._last: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        """Count one step."""
        self._last = outcome
        self._refused += not outcome.stepped
        self._rollbacks += outcome.restored is not None
        self._clipped += outcome.clipped
        self._incidents += bool(outcome.plan.actions)

    def numbers(self) -> dict[str, float]:
        """Return the counts and the last loss and norm under names of our own. NaN stays NaN."""
        last = self._last
        if last is None:
            return {}
        norm = math.nan if last.signals is None else last.signals.grad_norm
        return {
            "steadystep/loss": last.loss,
            "steadystep/grad_norm": norm,
            "steadystep/incidents": float(self._incidents),
            "steadystep/refused": float(self._refused),
            "steadystep/rollbacks": float(self._rollbacks),
            "steadystep/clipped": float(self._clipped),
            "steadystep/lr_mult": last.lr_mult,
        }
