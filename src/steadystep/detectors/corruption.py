"""Weights that changed by more than updates change them: a flipped bit, a failing memory, code that overwrites them.

Gradients and loss need not show it: a broken row of an embedding waits for its token, a zeroed layer may be one that
the others can do without for a while.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, final

from steadystep.records import REPLICAS_EVERY, WEIGHTS_EVERY, Finding, Signals
from steadystep.stats import is_absurd

_ARMED_AFTER = 3  # looks: the first steps change weights more than all later ones
_HISTORY = 8  # looks
_TIMES = 10.0  # the largest change between two looks so far, at the same learning rate
_SHARE = 0.5  # of the norm: less is left to the loss to show
_FLOOR = 0.15  # of the largest norm of all: a bias around zero multiplies its norm every day
_TRIFLE = 1e-3  # of the largest norm of all: what decay may have brought to zero


@final
class WeightJump:
    """Compares the norm of each weight tensor with the last measurement.

    A norm that is not finite or implausibly large asks for earlier weights. A mere jump is a warning, unless earlier
    weights do better on the current batch.
    """

    name = "weight-jump"

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._looked = 0
        self._at = 0
        self._rate = 0.0
        """The largest learning rate since the last look: what updates change is in proportion to it."""
        self._largest: dict[str, deque[float]] = {}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all tensors that jumped since the last measurement."""
        if self._rate < signals.lr < math.inf:
            self._rate = signals.lr
        if not signals.weight_norms:
            return ()
        now = dict(zip(signals.weights, signals.weight_norms, strict=True))
        broken = [name for name, norm in now.items() if self._is_broken(name, norm)]
        if broken:
            infinite = any(not math.isfinite(now[name]) for name in broken)
            what = "is no longer finite" if infinite else "is implausibly large for a weight"
            return (self._finding(signals, broken, now, what),)
        largest = max(now.values())
        jumped = [name for name, norm in now.items() if self._jumped(name, norm, largest)]
        found = (self._finding(signals, jumped, now, _told(now[jumped[0]])),) if jumped else ()
        # why: in trouble there are looks at every step, and what one step changes is no measure for twenty
        if signals.all_finite and (not self._looked or 2 * (signals.step - self._at) >= WEIGHTS_EVERY):
            self._learn(signals.step, now)
        return found

    def _is_broken(self, name: str, norm: float) -> bool:
        """Not finite, or beyond what weights come to, as 1e38 is: fp64 has room for it, and a gate may hide it."""
        return not math.isfinite(norm) or (is_absurd(norm) and not is_absurd(self._last.get(name, norm)))

    def _jumped(self, name: str, norm: float, largest: float) -> bool:
        last, changes = self._last.get(name), self._largest.get(name)
        if last is None or not changes or self._looked <= _ARMED_AFTER:
            return False
        if norm == 0.0 and last > _TRIFLE * largest:  # why without a floor: no update hits zero in every element
            return True
        if not any(changes):  # why: a group whose rate was 0 begins to learn, and how fast nobody has seen
            return False
        change = abs(norm - last)
        return change > _SHARE * max(last, _FLOOR * largest) and change > _TIMES * max(changes) * self._rate

    def _finding(self, signals: Signals, where: list[str], now: Mapping[str, float], what: str) -> Finding:
        worst = where[0]
        baseline = self._last.get(worst)
        was = "" if baseline is None else f"; norm {baseline:.3g} at step {self._at}, now {now[worst]:.3g}"
        return Finding(
            detector=self.name,
            step=signals.step,
            severity="act" if self._is_broken(worst, now[worst]) else "warn",
            value=now[worst],
            limit=math.inf if baseline is None else (1.0 + _SHARE) * baseline,
            baseline=baseline,
            what=f"{worst} {what}{was}",
            where=tuple(where),
            since=self._at if self._looked else 0,
        )

    def _learn(self, step: int, now: Mapping[str, float]) -> None:
        for name, norm in now.items():
            if name in self._last:
                change = abs(norm - self._last[name]) / (self._rate or 1.0)
                self._largest.setdefault(name, deque(maxlen=_HISTORY)).append(change)
        self._last, self._at, self._rate = dict(now), step, 0.0
        self._looked += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        changes = {name: list(values) for name, values in self._largest.items()}
        return {
            "last": dict(self._last),
            "looked": self._looked,
            "at": self._at,
            "rate": self._rate,
            "changes": changes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._last = {str(name): float(norm) for name, norm in state["last"].items()}
        self._looked, self._at, self._rate = int(state["looked"]), int(state["at"]), float(state["rate"])
        self._largest = {name: deque(map(float, values), maxlen=_HISTORY) for name, values in state["changes"].items()}


def _told(norm: float) -> str:
    """What was measured, not who did it: gradients that were not cleared add up to such a change too."""
    return "became zero in every element" if norm == 0.0 else "changed over 10 times as much as ever between two looks"


_KEPT = "kept."
_LARGEST_GRADIENT = 1e10  # its square is far from where numbers count as absurd
_PATIENCE = 2  # looks in a row, after which it is this optimizer's way


@final
class DamagedState:
    """Asks for action when a tensor of the optimizer state or of a kept object is not finite or implausibly large."""

    name = "damaged-state"

    def __init__(self) -> None:
        self._clean = 0
        """The step of the last look at which all was well."""
        self._largest_gradient = 0.0
        self._in_a_row: dict[str, int] = {}

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all tensors concerned."""
        if self._largest_gradient < signals.grad_norm < math.inf:
            self._largest_gradient = signals.grad_norm
        if not signals.state_peaks:
            return ()
        peaks = dict(zip(signals.state, signals.state_peaks, strict=True))
        bad = {name: peak for name, peak in peaks.items() if self._is_bad(peak)}
        told = {name: peak for name, peak in bad.items() if self._in_a_row.get(name, 0) < _PATIENCE}
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in bad}
        if not bad:
            self._clean = signals.step
        if not told:
            return ()
        # kept objects come last: what the optimizer holds goes into the next update
        where = sorted(told, key=lambda name: name.startswith(_KEPT))
        worst = told[where[0]]
        what = "not finite" if not math.isfinite(worst) else f"as large as {worst:.1e} although no gradient was"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=worst,
                limit=_LARGEST_GRADIENT,
                what=f"{where[0]} is {what}",
                where=tuple(where),
                since=self._clean,
            ),
        )

    def _is_bad(self, peak: float) -> bool:
        return not math.isfinite(peak) or (is_absurd(peak) and self._largest_gradient < _LARGEST_GRADIENT)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"clean": self._clean, "gradient": self._largest_gradient, "in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._clean, self._largest_gradient = int(state["clean"]), float(state["gradient"])
        self._in_a_row = {str(name): int(count) for name, count in state["in_a_row"].items()}


@final
class OddReplica:
    """Asks for action when weights differ between ranks; silent in a single process.

    The weights are restored from before the last comparison that found no difference.
    """

    name = "odd-replica"
    needs = "odd_replicas"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all weights that differ."""
        odd = signals.odd_replicas
        if not odd:
            return ()
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=float(len(odd)),
                limit=0.0,
                what="weights differ between ranks",
                where=odd,
                since=max(0, signals.step - REPLICAS_EVERY),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


@final
class BitFlips:
    """Reports bits of weights, optimizer state and buffers that changed by themselves between two updates.

    Asks for action where the gradients at hand were computed with them, or where they could not be put back.
    """

    name = "bit-flip"
    needs = "bit_flips"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all flips."""
        flips = signals.bit_flips
        if not flips:
            return ()
        first = flips[0]
        more = f" and {len(flips) - 1} more" if len(flips) > 1 else ""
        more = more if first.rank is None else f" on rank {first.rank}{more}"
        repaired = all(flip.repaired for flip in flips)
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act" if any(flip.used for flip in flips) else "warn",
                value=float(sum(not flip.repaired for flip in flips)),
                limit=0.0,
                what=f"bit {first.bit} of element {first.index} of {first.tensor} flipped between two updates{more}, "
                + ("and was put back" if repaired else "and could not be put back"),
                where=tuple(dict.fromkeys(flip.tensor for flip in flips)),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


@final
class Miscomputations:
    """Reports a step that gave another result when it was computed again.

    A warning where two results agree, which are used; asks for action where the machine cannot be trusted any more.
    """

    name = "miscomputation"
    needs = "miscomputations"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all ranks concerned."""
        found = signals.miscomputations
        if not found:
            return ()
        first = found[0]
        places = ", ".join(f"rank {each.rank} ({each.host})" for each in found)
        result = "its results cannot be trusted" if first.persistent else "the result that came again is used"
        more = f" and of {first.count - 1} more" if first.count > 1 else ""
        named = first.tensors[0] if first.tensors else "a gradient"
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act" if first.persistent else "warn",
                value=float(sum(each.bits for each in found)),
                limit=0.0,
                what=f"{places}: this step gave different results in {first.runs} computations ({first.bits} bits of "
                f"the {named}{more}); {result}",
                where=tuple(dict.fromkeys(name for each in found for name in each.tensors)),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""
