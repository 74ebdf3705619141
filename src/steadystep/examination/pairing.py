"""Whether samples keep their places and mean the same in evaluation: outputs by row, and losses by mode."""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor, nn

from steadystep.examination.dependence import by_sample, first_outputs, is_changed
from steadystep.examination.passes import Pass
from steadystep.examination.workbench import Workbench

_SAME = 1e-4  # of the spread of the outputs
_NORMS = nn.modules.batchnorm._BatchNorm
_FEWEST = 4
_LEARNED, _LOST = 0.6, 0.9  # of the loss of a constant prediction


def rows_move(bench: Workbench, batch: Any, seen: Pass) -> bool | None:
    """Whether the output has the right rows in another order, when the samples of a batch are exchanged.

    None where outputs have no row for each sample, or where rows are the same or mixed with each other.
    """
    size = seen.num_samples
    other = seen.with_inputs(batch, lambda t: t.roll(1, 0))
    if size < _FEWEST or not seen.inputs or not is_changed(batch, other):
        return None
    plain, turned = (by_sample(output, size) for output in first_outputs(bench, batch, other))
    if plain is None or turned is None or plain.shape != turned.shape:
        return None
    expected, found = plain.reshape(size, -1).roll(1, 0), turned.reshape(size, -1)
    least = _SAME * float(expected.std(0).amax().clamp_min(1e-12))  # sync: examined
    if _apart(plain.reshape(size, -1), found) <= least and not _follows(bench, batch):
        return None  # why: made of something else, as a generator's noise
    if _apart(expected, found) <= least:
        return False
    return _apart(_in_order(expected), _in_order(found)) <= least or None


def _follows(bench: Workbench, batch: Any) -> bool:
    """Whether another batch gives another output."""
    plain, other = first_outputs(bench, batch, bench.every[-1])
    if plain is None or other is None or plain.shape != other.shape:
        return False
    return not torch.equal(plain, other)  # sync: examined


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())  # sync: examined


def _in_order(rows: Tensor) -> Tensor:
    """Sorted by a mixture of all columns."""
    mixture = rows.double() @ torch.sin(1.0 + torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device))
    return rows[mixture.argsort()]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """Losses of the held batches: in training mode, in evaluation mode, and there with statistics of these data."""

    training: float
    evaluating: float
    renewed: float

    def differ(self, level: float) -> bool:
        """Whether what was learned is gone in evaluation mode and comes back with new statistics."""
        return (
            self.training < _LEARNED * level
            and not self.evaluating < _LOST * level
            and self.renewed < 0.5 * (self.training + level)
        )


def loss_by_mode(bench: Workbench, seen: Pass) -> Modes | None:
    """See `Modes`; None without batch normalization in training mode that keeps running statistics."""
    norms = [m for m in bench.model.modules() if isinstance(m, _NORMS) and m.training and m.running_mean is not None]
    if not norms or seen.num_samples < _FEWEST:
        return None
    with bench.set_aside():
        training = fmean(bench.losses(bench.held))
    with bench.set_aside():
        bench.model.eval()
        evaluating = fmean(bench.losses(bench.held))
    momenta = [norm.momentum for norm in norms]
    with bench.set_aside():
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # why: a plain mean
            bench.losses(bench.every)
            bench.model.eval()
            renewed = fmean(bench.losses(bench.held))
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    found = Modes(training=training, evaluating=evaluating, renewed=renewed)
    return found if math.isfinite(training + renewed) else None
