"""Rules that other systems ship, written anew from their papers and documents: as alarms, and as acts in a loop.

Each is faithful where it hurts: what the original does with a NaN, this does too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from steadystep.lab.bench.rules.norms import (
    Above,
    AdaGC,
    AutoClip,
    FixedClip,
    KillLossSpike,
    SkipStep,
    SpikeDetection,
    ZClip,
)
from steadystep.lab.bench.rules.rule import (
    COORDINATE_LIMIT,
    UNIT_LIMIT,
    RivalAction,
    RivalRule,
    RuleAlarm,
    Sample,
    Spam,
    clip_units,
    shrink_updates,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInfo:
    """One rule: how it is made, and what an alarm of it leads to."""

    name: str
    about: str
    make: Callable[[int], RivalRule]
    """For a run of so many steps."""
    does: Literal["scale", "skip", "stop", "log", "touch"]
    touch: Callable[[], RivalAction] | None = None
    """With "touch": its act, which needs tensors."""
    only_adam: bool = False
    each_tensor: bool = False
    """Its act wants every tensor in a parameter group of its own."""


RULES: dict[str, RuleInfo] = {
    info.name: info
    for info in (
        RuleInfo(name="clip 1.0", about="global norm held to 1", make=lambda n: FixedClip(), does="scale"),
        RuleInfo(name="ZClip", about="norm: z > 2.5 is scaled down", make=lambda n: ZClip(), does="scale"),
        RuleInfo(
            name="SkipStep", about="loss or norm 6 sigma off: update times 0", make=lambda n: SkipStep(), does="skip"
        ),
        RuleInfo(
            name="KillLossSpike",
            about="loss at 2x its mean for 5 steps: a line in the log",
            make=lambda n: KillLossSpike(num_steps=n),
            does="log",
        ),
        RuleInfo(
            name="SpikeDetection",
            about="loss at 3x the mean of ten, or NaN: raises after the update",
            make=lambda n: SpikeDetection(),
            does="stop",
        ),
        RuleInfo(name="AdaGC", about="each tensor held to 1.05x its average", make=lambda n: AdaGC(), does="scale"),
        RuleInfo(name="AutoClip", about="norm held to its 10th percentile", make=lambda n: AutoClip(), does="scale"),
        RuleInfo(
            name="AGC",
            about="each row held to 1 % of its weights",
            make=lambda n: Above(lambda seen: seen.unit, UNIT_LIMIT),
            does="touch",
            touch=lambda: clip_units,
        ),
        RuleInfo(
            name="SPAM",
            about="each coordinate held to sqrt(5000 v), moments reset",
            make=lambda n: Above(lambda seen: seen.coordinate, COORDINATE_LIMIT),
            does="touch",
            touch=Spam,
            only_adam=True,
        ),
        RuleInfo(
            name="StableAdamW",
            about="each tensor's rate over its RMS_t",
            make=lambda n: Above(lambda seen: seen.surprise, 1.0),
            does="touch",
            touch=lambda: shrink_updates,
            only_adam=True,
            each_tensor=True,
        ),
    )
}
"""By name. torch's GradScaler is not among them: it is part of every fp16 run here, guarded or not."""

__all__ = ["RULES", "RivalAction", "RivalRule", "RuleAlarm", "RuleInfo", "Sample"]
