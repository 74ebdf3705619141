"""All that is known about a run, in the form that charges ask for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import final

from steadystep.diagnosis.curve import Curve
from steadystep.diagnosis.layers import is_bias
from steadystep.diagnosis.tally import Tally
from steadystep.diagnosis.trace import Trace
from steadystep.records import InputStats, Probe


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One run so far."""

    trace: Trace
    curve: Curve | None
    """None while the run is too short to be read."""
    incidents: Mapping[str, Tally]
    """Steps that asked for action, by cause."""
    warned: Mapping[str, Tally]
    """Findings of severity warn or more, by detector."""
    noted: Mapping[str, Tally]
    """Findings of severity info, by detector."""
    ratios: tuple[float, ...]
    """Update-to-weight ratio over the run."""
    highest_ratio: float
    """The largest of any tensor that is not a bias."""
    first_probe: Probe | None
    probe: Probe | None
    """The last one."""
    inputs: InputStats | None
    scaled: bool
    opposed: bool = False
    """Another network learns in turns with this one: a loss that stands still is a balance."""

    @property
    def going_well(self) -> bool:
        """Something was learned and not lost again: what happened on the way has healed."""
        return self.curve is not None and self.curve.learned and self.curve.near_best

    @property
    def signed(self) -> bool:
        """Losses below zero, as with policy gradients: then their level means little."""
        return min(self.trace.losses, default=0.0) < 0.0

    @property
    def ratio(self) -> float | None:
        """The usual update-to-weight ratio of the second half of the run."""
        return median(self.ratios[len(self.ratios) // 2 :]) if self.ratios else None

    @property
    def idle_share(self) -> float:
        """Share of the later half of the updates whose gradient was exactly zero."""
        late = self.trace.norms[len(self.trace.norms) // 2 :]
        return sum(norm == 0.0 for norm in late) / len(late) if late else 0.0

    @property
    def done_share(self) -> float:
        """Share of the later half of the updates whose loss was exactly zero as well."""
        half = len(self.trace.norms) // 2
        late = list(zip(self.trace.norms[half:], self.trace.losses[half:], strict=True))
        return sum(norm == 0.0 == loss for norm, loss in late) / len(late) if late else 0.0

    @property
    def stuck_at_zero(self) -> tuple[str, ...]:
        """Weights, biases aside, that are all zero and that an update left so."""
        probe = self.probe
        if probe is None:
            return ()
        columns = zip(probe.names, probe.weight_rms, probe.update_rms, strict=False)
        return tuple(n for n, weight, update in columns if weight == 0.0 == update and not is_bias(n))

    @property
    def weights(self) -> tuple[str, ...]:
        """Tensors the last probe looked at, biases aside."""
        return () if self.probe is None else tuple(n for n in self.probe.names if not is_bias(n))

    def weights_above(self, rms: float) -> tuple[str, ...]:
        """Weights that were larger than this at the first probe, biases aside."""
        if self.first_probe is None:
            return ()
        sizes = zip(self.first_probe.names, self.first_probe.weight_rms, strict=False)
        return tuple(n for n, size in sizes if size > rms and not is_bias(n))

    @property
    def peak(self) -> tuple[float, int]:
        """The highest loss and its step."""
        return (-math.inf if self.trace.peak is None else self.trace.peak), self.trace.peak_step
