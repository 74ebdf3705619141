"""torchft: no replica commits a step whose gradients are not finite.

    optimizer = torchft.OptimizerWrapper(manager, optimizer)
    veto = steadystep.integrations.torchft.veto_non_finite(manager, model.parameters())

torchft averages the gradients of all replicas and commits whatever came out. A NaN of one replica is then in the
gradients of all, and each of them vetoes the commit by `manager.report_error`, torchft's own way to discard a step.
Only what is the same on all replicas is looked at: whatever else a guard decides from (losses) differs between them.
"""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from steadystep._utils.tensors import local_part
from steadystep._utils.text import logger
from steadystep.errors import MisuseError
from steadystep.integrations import install_line

try:
    from torchft import Manager  # type: ignore[import-not-found]
except ImportError as error:
    raise install_line("torchft", "torchft", error) from error


def veto_non_finite(manager: Manager, parameters: Iterable[Parameter]) -> "CommitVeto":
    """Let `manager` commit no step with a NaN or an infinite gradient; `remove()` ends it.

    Args:
        manager: torchft's `Manager`.
        parameters: the parameters that are trained.
    """
    return CommitVeto(manager, parameters)


@final
class CommitVeto:
    """Stands in front of `manager.should_commit`. Takes the arguments of `veto_non_finite`."""

    def __init__(self, manager: Manager, parameters: Iterable[Parameter]) -> None:
        if not callable(getattr(manager, "should_commit", None)) or not callable(
            getattr(manager, "report_error", None)
        ):
            raise MisuseError(f"veto_non_finite() takes torchft's Manager, got {type(manager).__name__}")
        self._manager, self._parameters = manager, list(parameters)
        self._own = manager.should_commit
        self.vetoed: list[int] = []
        """The steps, as the manager counts them, that were not committed."""
        manager.should_commit = self._should_commit

    def remove(self) -> None:
        """Leave the manager as it was."""
        vars(self._manager).pop("should_commit", None)

    def _should_commit(self, *args: Any, **kwargs: Any) -> bool:
        if not self._manager.errored() and not _all_finite(self._parameters):
            step = self._manager.current_step()
            self.vetoed.append(step)
            logger.warning("step %d: a gradient is not finite after the average over replicas: not committed", step)
            self._manager.report_error(FloatingPointError("a gradient is not finite"))
        committed: bool = self._own(*args, **kwargs)
        return committed


def _all_finite(parameters: Iterable[Parameter]) -> bool:
    grads: list[Tensor] = [local_part(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return True
    norms = torch._foreach_norm(grads, torch.inf)
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())  # sync: once per step
