"""Gradients that fade on their way down, that are exactly zero, or that belong to a loss of exactly zero."""

import math
from statistics import median_low
from typing import Any, final

from steadystep.records import Finding, Signals

_LIMIT = 1e-4
_EVERY_STEPS = 16
_PATIENCE = 4  # evaluations
_FEWEST = 4  # weight tensors: below, there is no depth to speak of


@final
class VanishingGradient:
    """Warns when the first quarter of the weights gets 1e-4 of the gradient of the last quarter, in medians.

    A ratio, so the scale of loss and data does not matter. Parameters are taken in the order in which the model names
    them.
    """

    name = "vanishing-gradient"

    def __init__(self) -> None:
        self._in_a_row = 0
        self._names: tuple[str, ...] = ()
        self._ends: tuple[list[int], list[int]] = ([], [])

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a warning when four evaluations in a row agree, once until the gradient comes back."""
        if signals.step % _EVERY_STEPS or not signals.grad_norm < math.inf:
            return ()
        if signals.names != self._names:
            self._names, self._ends = signals.names, _ends(signals.names)
        low, high = ([signals.norms[i] for i in end] for end in self._ends)
        if not low or not all(map(math.isfinite, low + high)):
            return ()
        first, last = median_low(low), median_low(high)
        if last <= 0.0:  # why: zero everywhere is another fault
            return ()
        ratio = first / last
        self._in_a_row = self._in_a_row + 1 if ratio < _LIMIT else 0
        if self._in_a_row != _PATIENCE:
            return ()
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=ratio,
                limit=_LIMIT,
                what=f"the gradient of the first layers is {ratio:.0e} of that of the last ones",
                where=tuple(signals.names[i] for i in self._ends[0]),
                since=max(0, signals.step - _EVERY_STEPS * (_PATIENCE - 1)),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._in_a_row = int(state["in_a_row"])


def _ends(names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Positions of the first and the last quarter of the weights; none when there is no depth."""
    weights = [i for i, name in enumerate(names) if name.endswith("weight")]
    quarter = len(weights) // 4 if len(weights) >= _FEWEST else 0
    return weights[:quarter], weights[len(weights) - quarter :]


_ZERO_STEPS = 8
_ZERO_EVERY_STEPS = 4
_EVALUATIONS = 64
_ALIVE, _STOPPED = 8, 16  # evaluations with a gradient before, and without one since
_UNDERFLOWS = 3  # steps without any gradient in a row, under a loss scaler
_MENDED = 1000  # steps with a gradient, less those without: then a new streak is news
_QUIET_STEPS = 500  # between two warnings about single tensors


@final
class ZeroGradient:
    """Warns when all gradients are zero for 8 steps, and once for a tensor that had gradients and has none for 64.

    The first is reported once, and again only after 1,000 steps that mostly had a gradient: a loss that is often
    exactly zero has such streaks all the time. Tensors that stop one after another are reported together, every 500
    steps.

    A tensor that never had a gradient in 256 steps is a note: unused branches and experts that were never chosen are no
    faults. So is, under a loss scaler, each step without any gradient from the third in a row on: such an update would
    only run down the moments. A run that comes back from such a streak before 8 steps has losses without a gradient,
    and gets no more of those notes.
    """

    name = "zero-gradient"

    def __init__(self) -> None:
        self._in_a_row = 0
        self._zeros: dict[str, int] = {}
        self._all_alive = 0
        self._alive: dict[str, int] = {}
        self._told: set[str] = set()
        self._mended = _MENDED
        """Steps with a gradient less those without, since a streak was told."""
        self._until = 0
        """No warning about single tensors before this step."""
        self._has_streaks = False
        """Short ones without a gradient are part of this run."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a warning or a note when the count is reached."""
        if signals.grad_norm != 0.0:
            if signals.grad_norm < math.inf:
                self._has_streaks = self._has_streaks or _UNDERFLOWS <= self._in_a_row < _ZERO_STEPS
                self._in_a_row = 0
                self._mended += self._mended < _MENDED
            return self._single(signals) if signals.step % _ZERO_EVERY_STEPS == 0 else ()
        if not math.isfinite(signals.loss) or signals.loss == 0.0:  # a loss of exactly 0 has nothing left to learn
            return ()
        self._in_a_row += 1
        news = self._mended >= _MENDED
        if self._in_a_row != _ZERO_STEPS or not news:
            self._mended -= 0 < self._mended < _MENDED
            return self._underflow(signals)
        self._mended = 0
        since = max(0, signals.step - _ZERO_STEPS + 1)
        what = f"every gradient has been exactly zero for {_ZERO_STEPS} steps: the output cannot learn"
        return (
            Finding(
                detector=self.name, step=signals.step, severity="warn", value=0.0, limit=0.0, what=what, since=since
            ),
        )

    def _underflow(self, signals: Signals) -> tuple[Finding, ...]:
        if not signals.scaled or self._in_a_row < _UNDERFLOWS or self._has_streaks or not self._all_alive:
            return ()
        what = f"every gradient is exactly zero, for the {self._in_a_row}th step in a row"
        return (Finding(detector=self.name, step=signals.step, severity="info", value=0.0, limit=0.0, what=what),)

    def _single(self, signals: Signals) -> tuple[Finding, ...]:
        if 0.0 not in signals.norms:
            self._all_alive += 1
            if self._zeros:
                self._zeros = {}
            return ()
        if not math.isfinite(signals.grad_norm):
            return ()
        pairs = list(zip(signals.names, signals.norms, strict=False))
        self._zeros = {name: self._zeros.get(name, 0) + 1 for name, norm in pairs if norm == 0.0}
        self._alive |= {name: self._alive.get(name, 0) + 1 for name, norm in pairs if norm != 0.0}
        stopped = tuple(name for name, count in self._zeros.items() if count >= _STOPPED and self._was_alive(name))
        if stopped and signals.step >= self._until:
            self._told |= set(stopped)
            self._until = signals.step + _QUIET_STEPS
            return (self._stopped(signals, stopped),)
        never = [name for name in self._zeros if name not in self._told and not self._was_alive(name)]
        where = tuple(name for name in never if self._zeros[name] == _EVALUATIONS)
        if not where:
            return ()
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="info",
                value=0.0,
                limit=0.0,
                what="some tensors never receive a gradient while others do",
                where=where,
            ),
        )

    def _was_alive(self, name: str) -> bool:
        return name not in self._told and self._all_alive + self._alive.get(name, 0) >= _ALIVE

    def _stopped(self, signals: Signals, where: tuple[str, ...]) -> Finding:
        since = max(0, signals.step - max(self._zeros[name] for name in where) * _ZERO_EVERY_STEPS)
        return Finding(
            detector=self.name,
            step=signals.step,
            severity="warn",
            value=0.0,
            limit=0.0,
            what=f"some tensors have received no gradient since about step {since}",
            where=where,
            since=since,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        alive = [self._all_alive, dict(self._alive), sorted(self._told)]
        said = [self._mended, self._until, int(self._has_streaks)]
        return {"in_a_row": self._in_a_row, "zeros": dict(self._zeros), "alive": alive, "said": said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._in_a_row = int(state["in_a_row"])
        self._zeros = {name: int(count) for name, count in state["zeros"].items()}
        self._all_alive, alive, told = state.get("alive", (0, {}, ()))  # older states do not have it
        self._alive, self._told = dict(alive), set(told)
        self._mended, self._until, *more = (int(value) for value in state.get("said", (_MENDED, 0)))
        self._has_streaks = bool(more and more[0])


_STEPS_WITHOUT_ZERO = 64  # without a zero: experts that are not chosen and losses that reach zero come back sooner


@final
class SuddenZero:
    """A layer whose weights became zero passes nothing on, so its neighbours get a gradient of exactly zero at once.

    A few updates later neither the gradients nor the norm of the layer show it.
    """

    def __init__(self) -> None:
        self._without = 0

    def update(self, signals: Signals) -> bool:
        """True at the first step with a zero after 64 without one."""
        if 0.0 not in signals.norms:
            self._without += 1
            return False
        sudden = self._without >= _STEPS_WITHOUT_ZERO
        self._without = 0
        return sudden

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"without": self._without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._without = int(state["without"])


_TINY = 1e-12
_PERFECT_STEPS = 16
_REAL = 1e-3  # a loss that began above this was measuring something


@final
class SuspiciousPerfection:
    """Notes once that 16 losses in a row are exactly 0, or below 1e-12 in a run that began above 1e-3.

    Usual causes: the target leaks into the input, every target is masked, or the loss is detached from the prediction.
    """

    name = "suspicious-perfection"

    def __init__(self) -> None:
        self._first: float | None = None
        self._zeros = 0
        self._tiny = 0
        self._done = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding in a run; non-finite losses do not count."""
        if signals.loss > _TINY and self._first is not None:
            if signals.loss - signals.loss == 0.0:
                self._zeros = self._tiny = 0
            return ()
        return self._look_closer(signals)

    def _look_closer(self, signals: Signals) -> tuple[Finding, ...]:
        loss = signals.loss
        if loss - loss != 0.0:
            return ()
        if self._first is None:
            self._first = loss
        self._zeros = self._zeros + 1 if loss == 0.0 else 0
        self._tiny = self._tiny + 1 if abs(loss) <= _TINY and self._first > _REAL else 0
        if self._done or max(self._zeros, self._tiny) < _PERFECT_STEPS:
            return ()
        self._done = True
        size = "exactly 0" if self._zeros >= _PERFECT_STEPS else f"below {_TINY:g}"
        what = f"the loss has been {size} for {_PERFECT_STEPS} steps"
        return (Finding(detector=self.name, step=signals.step, severity="info", value=loss, limit=_TINY, what=what),)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"first": self._first, "zeros": self._zeros, "tiny": self._tiny, "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._first = None if state["first"] is None else float(state["first"])
        self._zeros, self._tiny, self._done = int(state["zeros"]), int(state["tiny"]), bool(state["done"])
