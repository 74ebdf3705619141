"""The clip that everybody has: scale the gradients to a global norm of 1."""

from typing import final

from steadystep.lab.bench.rules.rule import FINE, Sample, Verdict


@final
class FixedClip:
    """As `torch.nn.utils.clip_grad_norm_`: a NaN norm makes every gradient NaN, an infinite one zeroes finite ones."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self._max_norm = max_norm

    def update(self, seen: Sample) -> Verdict:
        """Above the limit it clips."""
        if seen.norm <= self._max_norm:
            return FINE
        return Verdict(alarm=seen.norm > self._max_norm, scale=clip_factor(seen.norm, self._max_norm))


def clip_factor(norm: float, limit: float) -> float:
    """What torch multiplies with: NaN for a NaN norm, 0 for an infinite one.

    >>> clip_factor(4.0, 1.0), clip_factor(float("inf"), 1.0), clip_factor(0.5, 1.0)
    (0.24999993750001562, 0.0, 1.0)
    """
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
