"""A loss that is still where it began, or stalls while units are saturated."""

import math
from statistics import median
from typing import Any, final

from steadystep.detectors.detector import Runs
from steadystep.records import Finding, Signals
from steadystep.stats import SIGMA_PER_MAD

_NOTHING: tuple[Finding, ...] = ()
_PATIENCE = 300
_FIRST = 16
_LAST = 64
_LEAST_GAIN = 0.01
_SIGMAS = 2.0
# One sigma of the difference of two medians, in units of the MAD of the losses.
_DIFFERENCE = SIGMA_PER_MAD * 1.2533 * math.sqrt(1 / _FIRST + 1 / _LAST)
_MOST_CLASSES = 1000
_ABOUT = 0.02


@final
class NoLearning:
    """Notes once, after 300 losses, that the median of the last 64 is no better than that of the first 16.

    Only a note: a fine-tune may begin at its floor. Waits while the learning rate is still warming up, and ignores
    losses that are not positive, whose level means nothing. Names the number of classes C whose ln(C) fits the loss, if
    any.
    """

    name = "no-learning"

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._seen = 0
        self._lr = 0.0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding in a run; non-finite losses do not count."""
        if self._done:
            return _NOTHING
        loss = signals.loss
        if loss - loss == 0.0:
            self._last.append(loss)
            if len(self._last) == _LAST:
                return self._judge(signals)
        return _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        last, self._last = self._last, []
        if not self._first:
            self._first = last[:_FIRST]
        self._seen += _LAST
        warming_up = signals.lr > self._lr
        if math.isfinite(signals.lr):
            self._lr = signals.lr
        self._done = min(last) <= 0.0
        if self._done or self._seen < _PATIENCE or warming_up:
            return _NOTHING
        self._done = True
        before, level = median(self._first), median(last)
        noise = median(abs(loss - level) for loss in last)
        needed = max(_LEAST_GAIN * before, _SIGMAS * _DIFFERENCE * noise)
        if before - level > needed:
            return _NOTHING
        what = f"after {self._seen} steps the loss is {level:.4g}, from {before:.4g} at the start{_guessing(level)}"
        return (
            Finding(
                detector=self.name, step=signals.step, severity="info", value=level, limit=before - needed, what=what
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "first": list(self._first),
            "last": list(self._last),
            "seen": self._seen,
            "lr": self._lr,
            "done": self._done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = [float(x) for x in state["first"]]
        self._last = [float(x) for x in state["last"]]
        self._seen, self._lr, self._done = int(state["seen"]), float(state["lr"]), bool(state["done"])


def _guessing(level: float) -> str:
    """What the level would be worth as the cross-entropy of a guess."""
    if level > math.log(_MOST_CLASSES) * (1.0 + _ABOUT):
        return ""
    classes = round(math.exp(level))
    if abs(level - math.log(classes)) > _ABOUT * math.log(classes):
        return ""
    return f", about ln({classes}): the loss of guessing among {classes} classes"


_BLOCK = 64
_EARLY = 64  # steps in which it leaps
_RUN = 5  # losses in a row, of which the median counts
_LEAP = 1.5  # times the first loss, and times the largest of the last 64: noise does not do that five times in a row
_NOTHING_LEARNED = 0.7  # of the first loss; guessing letters by their frequency gives 0.8 of guessing them evenly
_FLAT = 0.01  # of the first loss, between blocks
_FLAT_BLOCKS = 3
_GIVE_UP_STEPS = 512  # steps: a run that is not back at its start by then is something else


@final
class ConstantPrediction:
    """Warns once: the loss jumped in the first 64 steps and settled near the first loss for three windows of 64."""

    name = "constant-prediction"

    def __init__(self) -> None:
        self._first: float | None = None
        self._losses: list[float] = []
        self._peak = 0.0
        """The largest median of five losses in a row among the first ones."""
        self._levels: list[float] = []
        self._seen = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding in a run; non-finite losses do not count."""
        if self._done:
            return _NOTHING
        loss = signals.loss
        if not math.isfinite(loss):
            return _NOTHING
        if self._first is None:
            self._first = loss
        self._seen += 1
        self._losses.append(loss)
        if self._seen <= _EARLY and len(self._losses) >= _RUN:
            self._peak = max(self._peak, median(self._losses[-_RUN:]))
        return self._judge(signals) if self._seen % _BLOCK == 0 else _NOTHING

    def _judge(self, signals: Signals) -> tuple[Finding, ...]:
        last, self._losses = self._losses, []
        first = self._first
        assert first is not None
        self._levels = [*self._levels[1 - _FLAT_BLOCKS :], median(last)]
        self._done = not first > 0.0 or self._peak <= _LEAP * first or self._seen >= _GIVE_UP_STEPS
        if self._done or len(self._levels) < _FLAT_BLOCKS or self._seen <= _EARLY:
            return _NOTHING
        level = self._levels[-1]
        rests = max(self._levels) - min(self._levels) <= _FLAT * first
        if not rests or level < _NOTHING_LEARNED * first or self._peak <= _LEAP * max(last):
            return _NOTHING
        self._done = True
        what = f"the loss rose from {first:.4g} to {self._peak:.4g} in the first steps and has settled at"
        what += f" {level:.4g}: the model predicts the same for every input"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=level,
                limit=_NOTHING_LEARNED * first,
                baseline=first,
                what=what,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "first": self._first,
            "losses": list(self._losses),
            "peak": self._peak,
            "levels": list(self._levels),
            "seen": self._seen,
            "done": self._done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._losses = [float(loss) for loss in state["losses"]]
        self._levels = [float(level) for level in state["levels"]]
        self._peak, self._seen, self._done = float(state["peak"]), int(state["seen"]), bool(state["done"])


_SATURATED = 0.7  # of the values of an activation
_SATURATED_QUIET_STEPS = 4  # the first probes follow each other too closely to count as lasting
_LEARNT = 0.5  # of the first loss: below it, a classifier is sure of itself and saturates rightly
_FEWEST_LOSSES, _MOST_LOSSES = 16, 256  # on either side of a probe
_LEAST_FALL = 0.02  # of the level, as in `diagnosis.learning`
_ERRORS = 3.0


@final
class SaturatedUnits:
    """Warns once for each activation with over 70 % saturated values in three probes in a row, where learning stalls.

    It does not while the mean loss since the last probe is below that of the stretch before it, by 2 % and by more than
    its noise, nor below half of the first loss. A loss that started at zero or below counts as high while it has not
    fallen at all.
    """

    name = "saturated-units"

    def __init__(self) -> None:
        self._runs = Runs(3)
        self._first: float | None = None
        self._losses: list[float] = []
        """The latest, since the last probe."""
        self._before: list[float] = []
        """Mean loss before that, and its standard error."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all activations that were just confirmed saturated."""
        loss, probe = signals.loss, signals.probe
        if loss - loss == 0.0:
            self._first = loss if self._first is None else self._first
            self._losses.append(loss)
            del self._losses[:-_MOST_LOSSES]
        if probe is None or not probe.saturated or probe.step <= _SATURATED_QUIET_STEPS:
            return _NOTHING
        high = self._is_high(loss) and not self._falls()
        shares = dict(zip(probe.modules, probe.saturated, strict=False))
        where = self._runs.add({name: high and share > _SATURATED for name, share in shares.items()})
        if not where:
            return _NOTHING
        worst = max(shares[name] for name in where)
        what = f"up to {worst:.0%} of the outputs of a sigmoid or tanh are saturated"
        known: dict[str, Any] = {"value": worst, "limit": _SATURATED, "what": what, "where": where}
        return (Finding(detector=self.name, step=signals.step, severity="warn", **known),)

    def _falls(self) -> bool:
        """Whether the loss has fallen from the stretch before the last probe to the one since."""
        losses, before, self._losses, self._before = self._losses, self._before, [], []
        if len(losses) < _FEWEST_LOSSES:
            return False
        mean = sum(loss / len(losses) for loss in losses)  # why not fmean: large losses overflow its sum
        error = math.hypot(*(loss - mean for loss in losses)) / len(losses)
        self._before = [mean, error] if math.isfinite(mean + error) else []
        if not before:
            return False
        return before[0] - mean > max(_LEAST_FALL * abs(before[0]), _ERRORS * math.hypot(before[1], error))

    def _is_high(self, loss: float) -> bool:
        if self._first is None:
            return False
        return loss > _LEARNT * self._first if self._first > 0.0 else loss >= self._first

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        stretches = [list(self._losses), list(self._before)]
        return {"runs": self._runs.state_dict(), "first": self._first, "stretches": stretches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; earlier versions had no stretches."""
        self._runs.load_state_dict(state["runs"])
        self._first = None if state["first"] is None else float(state["first"])
        self._losses, self._before = ([float(v) for v in part] for part in state.get("stretches", ((), ())))
