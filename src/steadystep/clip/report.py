"""What a clip measured and did."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClipReport:
    """`scale == 0.0` means: do not step, the gradients are not finite and were left alone."""

    norm_before: float
    scale: float
    clipped: bool
    finite: bool
