"""Clipping tensor by tensor or unit by unit inside a guarded update, from the norms that were measured already."""

from typing import TYPE_CHECKING, Protocol, final

from steadystep.clip import TensorEMAClip
from steadystep.clip.global_norm import multiply_each_
from steadystep.clip.per_tensor import scale_units_
from steadystep.optimizers import Trained

if TYPE_CHECKING:
    from steadystep.signals.gradients import GradientView


class TensorClip(Protocol):
    """Scales some of the gradients of a look, in place."""

    def clip_(self, view: "GradientView") -> bool:
        """True when one was known to be scaled."""
        ...


@final
class ByUnits:
    """Adaptive gradient clipping. What it scaled stays on the device: asking would cost a second host read."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def clip_(self, view: "GradientView") -> bool:
        """Each unit to at most a hundredth of its weights' norm."""
        scale_units_([p for p in self._trained.parameters if p.grad is not None])
        return False


@final
class ByTensors:
    """Each tensor against its own past."""

    def __init__(self, rule: TensorEMAClip) -> None:
        self._rule = rule

    def clip_(self, view: "GradientView") -> bool:
        """Learn from the norms and scale the tensors above their limits."""
        norms = dict(zip(view.signals.names, view.signals.norms, strict=True))
        limits = self._rule.limits(norms)
        self._rule.learn(norms)
        factors = [min(1.0, limits[name] / norm) if norm else 1.0 for name, norm in norms.items()]
        if all(factor == 1.0 for factor in factors):
            return False
        multiply_each_(view.grads, view.layout, factors)
        return True
