"""What a clip measured and did."""

from dataclasses import dataclass
from typing import Self, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClipReport:
    """`scale == 0.0` means: do not step, the gradients are not finite and were left alone.

    Where all gradients are scaled alike, `scale` is that factor. Where rows or tensors have factors of their own
    (`agc_`, `TensorEMAClip`) it is the global norm after ÷ before. `clip_value_` does not scale and says 1.0.

    >>> report = ClipReport(norm_before=5.0, scale=0.2, clipped=True, finite=True)
    >>> report.norm_before * report.scale
    1.0
    >>> ClipReport.refused(float("nan")).scale
    0.0
    """

    norm_before: float
    scale: float
    clipped: bool
    finite: bool

    @classmethod
    def refused(cls, norm: float) -> Self:
        """The report for a norm that is not finite."""
        return cls(norm_before=norm, scale=0.0, clipped=False, finite=False)

    @classmethod
    def scaled(cls, norm: float, scale: float) -> Self:
        """The report for finite gradients multiplied by `scale`."""
        return cls(norm_before=norm, scale=scale, clipped=scale < 1.0, finite=True)
