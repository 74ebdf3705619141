"""One device's share of a probe: samples of its weights before an update, and what they show after it.

RMS_t = sqrt(mean(g² / max(v, eps²))) is StableAdamW's (Wortsman et al. 2023, arXiv 2304.13013), here over the elements
that have a gradient: rows of an embedding that no token asked for say nothing.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import final

from torch import Tensor
from torch.nn import Parameter

from steadystep.clip.sharded import local_part
from steadystep.signals.moments import Moments
from steadystep.signals.samples import Strips, is_plain

_TINY = 1e-30  # in place of an eps² of zero: 0 / 0 must not be


@final
class Lot:
    """Parameters of one device: `remember` before the update, `measure` after it, `read` once on the host."""

    def __init__(self, names: Sequence[str], params: Sequence[Parameter], moments: Moments) -> None:
        self.names = tuple(names)
        self._params = params
        self._moments = moments
        self._strips = Strips([local_part(p).numel() for p in params], params[0].device)
        self._before: Tensor | None = None
        self._has_gradient: list[bool] = []
        self._has_moment: list[bool] = []

    def remember(self) -> None:
        """Sample the weights."""
        self._before = self._strips.lay(self._parts())

    def forget(self) -> None:
        """Let go of the sample."""
        self._before = None

    def measure(self) -> Tensor:
        """After the update: all numbers in one flat tensor, on the device."""
        assert self._before is not None, "measure() needs remember()"
        strips, params = self._strips, self._parts()
        weights = strips.lay(params)
        changes = self._before.sub_(weights)
        grads = [_usable(p.grad) for p in self._params]
        g = strips.lay([p if grad is None else grad for p, grad in zip(params, grads, strict=True)])
        quantities = [weights.square_(), changes.square_(), g.sign().square_()]
        second = self._moments.now()
        if second is not None:
            v = strips.lay([p if v is None else v for p, v in zip(params, second.tensors, strict=True)])
            quantities += [g.square_() / v.clamp(min=strips.per_row(second.floors.clamp_(min=_TINY))), v]
        self._before = None
        self._has_gradient = [grad is not None for grad in grads]
        self._has_moment = [v is not None for v in second.tensors] if second else []
        sums = strips.sums(quantities)
        counted = sums[2].clone()
        sums /= strips.lengths
        if second is not None:
            sums[4] /= second.corrections  # so that the first probes are worth something: v fills up from zero
            sums[3] *= second.corrections * strips.lengths / counted  # no gradient at all: NaN, unknown
        return sums.flatten()

    def _parts(self) -> list[Tensor]:
        """What this rank holds of the parameters."""
        return [local_part(p) for p in self._params]

    def read(self, host: Iterator[float]) -> tuple[list[float], ...]:
        """Weight RMS, update RMS, second moments, surprises and zero shares, from the numbers of `measure`."""
        count = len(self.names)
        weights, updates, present = (list(islice(host, count)) for _ in range(3))
        zeros = _known([1.0 - share for share in present], self._has_gradient)
        surprises, moments = [math.nan] * count, [math.nan] * count
        if self._has_moment:
            surprises = _known([_root(x) for x in islice(host, count)], self._has_gradient)
            surprises = _known(surprises, self._has_moment)
            moments = _known(list(islice(host, count)), self._has_moment)
        return [_root(x) for x in weights], [_root(x) for x in updates], moments, surprises, zeros


def _usable(grad: Tensor | None) -> Tensor | None:
    return local_part(grad) if grad is not None and is_plain(grad) else None


def _known(values: list[float], flags: list[bool]) -> list[float]:
    if all(flags):
        return values
    return [value if flag else math.nan for value, flag in zip(values, flags, strict=True)]


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0.0 else math.nan
