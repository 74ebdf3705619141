"""Learning-rate schedules as pure functions: step -> multiplier of the base learning rate.

Steps count updates from 0. Everything but `as_torch` and `from_torch` runs without torch. `named` makes them by the
names people know from transformers and torch, as a YAML file gives them.
"""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from steadystep._utils import lazy_names
from steadystep._utils.numbers import whole
from steadystep._utils.text import alike
from steadystep.errors import ConfigError
from steadystep.schedule.curves import (
    Schedule,
    checked_share,
    constant,
    cosine,
    cosine_restarts,
    exponential,
    half_cosine,
    inverse_sqrt,
    linear,
    one_minus_sqrt,
    polynomial,
    step_decay,
    then,
    warmup,
    wsd,
)
from steadystep.schedule.learning_rate_cut import Plateau

if TYPE_CHECKING:
    from steadystep.schedule.torch_bridge import as_torch, from_torch

__all__ = [
    "NAMES",
    "Plateau",
    "Schedule",
    "as_torch",
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "from_torch",
    "inverse_sqrt",
    "linear",
    "named",
    "one_minus_sqrt",
    "polynomial",
    "step_decay",
    "then",
    "warmup",
    "wsd",
]

__getattr__ = lazy_names(__name__, {"torch_bridge": ("as_torch", "from_torch")})


def named(
    name: str,
    *,
    total_steps: int | None = None,
    warmup_steps: int | float = 0,
    floor: float = 0.0,
    warmup_start: float = 0.0,
    **options: Any,
) -> Schedule:
    """Return a warmup followed by the schedule called `name`, which ends at `total_steps`.

    Args:
        name: one of `NAMES`; case and hyphens do not matter.
        total_steps: updates in the whole run, warmup included. Not needed by `constant`, `step`, `exponential`,
            `inverse_sqrt` and `plateau`.
        warmup_steps: a count, or a fraction of `total_steps` between 0 and 1 (rounded up).
        floor: the lowest multiplier after the warmup.
        warmup_start: multiplier at step 0.
        **options: arguments of the schedule itself: `num_cycles` (cosine_with_restarts), `power` (polynomial),
            `timescale` (inverse_sqrt; default: the warmup's length), `step_size` and `gamma` (step), `gamma`
            (exponential), `decay_steps`, a count or a fraction, and `decay_type` (wsd), the arguments of `Plateau`.

    Raises:
        ConfigError: the name or an option is unknown, or `total_steps` is missing.

    >>> schedule = named("cosine", total_steps=100, warmup_steps=0.1, floor=0.05)
    >>> [round(schedule(step), 3) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.525, 0.05]
    """
    key = _key(name)
    build = _BUILDERS[key]
    _check_options(key, build, options)
    run = _Run.checked(key, total_steps, warmup_steps, floor=floor, start=warmup_start)
    return build(run, **options)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What every schedule of a run shares, checked."""

    where: str
    total_steps: int | None
    warmup_steps: int
    floor: float
    start: float

    @classmethod
    def checked(cls, key: str, total: int | None, warmup: int | float, *, floor: float, start: float) -> "_Run":
        where = f"schedule '{key}'"
        if total is not None:
            total = whole(f"{where}: total_steps", total, least=1)
        rise = _count(where, "warmup_steps", warmup, total)
        if total is not None and rise >= total:
            raise ConfigError(
                f"{where}: warmup_steps = {warmup!r} of total_steps = {total}: the run would end before its warmup, "
                "with no step left to decay; 5 to 10 % of the steps is typical"
            )
        low, first = checked_share(f"{where}: floor", floor), checked_share(f"{where}: warmup_start", start)
        return cls(where=where, total_steps=total, warmup_steps=rise, floor=low, start=first)

    @property
    def steps_after_warmup(self) -> int:
        if self.total_steps is None:
            raise ConfigError(f"{self.where} needs total_steps: the number of updates in the whole run")
        return self.total_steps - self.warmup_steps

    def warmed(self, schedule: Schedule) -> Schedule:
        return then(warmup(self.warmup_steps, self.start), self.warmup_steps, schedule)


def _linear(run: _Run) -> Schedule:
    return run.warmed(linear(run.steps_after_warmup, run.floor))


def _cosine(run: _Run) -> Schedule:
    return run.warmed(cosine(run.steps_after_warmup, run.floor))


def _cosine_with_restarts(run: _Run, *, num_cycles: int = 1) -> Schedule:
    cycles, total = whole(f"{run.where}: num_cycles", num_cycles, least=1), run.steps_after_warmup
    if cycles > total:
        raise ConfigError(f"{run.where}: num_cycles = {cycles} in {total} steps: a cycle needs at least one step")

    def at(step: int) -> float:
        # why: in whole numbers, so that a restart falls on its step whatever the cycle's length rounds to
        passed = step * cycles % total / total
        return run.floor + (1.0 - run.floor) * half_cosine(passed)

    return run.warmed(then(at, total, constant(run.floor)))


def _constant(run: _Run) -> Schedule:
    return run.warmed(constant())


def _polynomial(run: _Run, *, power: float = 1.0) -> Schedule:
    return run.warmed(polynomial(run.steps_after_warmup, power, run.floor))


def _inverse_sqrt(run: _Run, *, timescale: int | None = None) -> Schedule:
    scale = (run.warmup_steps or 10_000) if timescale is None else timescale
    return run.warmed(inverse_sqrt(scale, run.floor))


def _step(run: _Run, *, step_size: int, gamma: float = 0.1) -> Schedule:
    return run.warmed(step_decay(step_size, gamma, run.floor))


def _exponential(run: _Run, *, gamma: float) -> Schedule:
    return run.warmed(exponential(gamma, run.floor))


def _wsd(
    run: _Run,
    *,
    decay_steps: int | float = 0.1,
    decay_type: Literal["cosine", "linear", "1-sqrt"] = "cosine",
) -> Schedule:
    if decay_type not in _DECAYS:
        raise ConfigError(f"{run.where}: decay_type = {decay_type!r}: use one of {', '.join(_DECAYS)}")
    fall = _count(run.where, "decay_steps", decay_steps, run.total_steps)
    stable = run.steps_after_warmup - fall
    if stable < 0:
        raise ConfigError(
            f"{run.where}: warmup_steps = {run.warmup_steps} and decay_steps = {fall} are more than "
            f"total_steps = {run.total_steps}: shorten one of them"
        )
    return wsd(run.warmup_steps, stable, fall, run.floor, start=run.start, curve=_DECAYS[decay_type])


def _plateau(run: _Run, **options: Any) -> Plateau:
    return Plateau(floor=run.floor, warmup_steps=run.warmup_steps, warmup_start=run.start, **options)


_DECAYS = {"cosine": cosine, "linear": linear, "1-sqrt": one_minus_sqrt}

_BUILDERS: dict[str, Callable[..., Schedule]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "step": _step,
    "exponential": _exponential,
    "wsd": _wsd,
    "plateau": _plateau,
}
NAMES = tuple(_BUILDERS)
"""Names that `named` and `training.lr_scheduler` accept."""

# What others call the same things.
_ALIASES = {
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "reduce_lr_on_plateau": "plateau",
    "cosine_annealing": "cosine",
    "step_lr": "step",
}


def _key(name: str) -> str:
    plain = re.sub(r"[\s-]+", "_", str(name).strip().lower())
    key = _ALIASES.get(plain, plain)
    if key not in _BUILDERS:
        close = alike(plain, [*_BUILDERS, *_ALIASES])
        hint = f"did you mean '{close[0]}'?" if close else f"use one of {', '.join(NAMES)}"
        raise ConfigError(f"schedule {name!r} is unknown: {hint}")
    return key


def _count(where: str, key: str, value: int | float, total: int | None) -> int:
    """Steps from a count or from a fraction of the total."""
    if not isinstance(value, float):
        return whole(f"{where}: {key}", value, least=0)
    if value == 0.0:
        return 0
    if not 0.0 < value < 1.0:
        raise ConfigError(f"{where}: {key} = {value!r}: must be an integer count or a fraction between 0 and 1")
    if total is None:
        raise ConfigError(f"{where}: {key} = {value!r} is a fraction and needs total_steps")
    return max(1, math.ceil(round(value * total, 6)))  # why: 0.07 * 100 is a little more than 7


def _check_options(key: str, build: Callable[..., Schedule], options: dict[str, Any]) -> None:
    taken = inspect.signature(Plateau if build is _plateau else build).parameters
    shared = ("run", "floor", "warmup_steps", "warmup_start")
    known = {option: parameter for option, parameter in taken.items() if option not in shared}
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigError(f"schedule '{key}' has no option {option!r}: {takes}")
    missing = [o for o, p in known.items() if p.default is p.empty and o not in options]
    if missing:
        raise ConfigError(f"schedule '{key}' needs {' and '.join(missing)}")
