"""The gate: NaN or infinity in the loss, in a gradient, in a buffer the forward pass wrote, or in the learning rate."""

import math
from typing import Any, final

from steadystep.records import Finding, Severity, Signals
from steadystep.stats import is_absurd

_LARGEST = 3.4028234663852886e38  # fp32
_TOLERATED_AFTER, _WITHIN = 3, 200  # losses with finite gradients; steps


@final
class NonFinite:
    """Reports a loss, gradient, buffer or learning rate that is NaN or infinite, each by itself.

    With a loss scaler, overflowing gradients under a finite loss are routine and only a note. A loss that is NaN again
    and again while every gradient is finite has a term without a gradient (a logged extra, a masked log of 0): the
    third time within 200 steps it is reported, and from then on such updates are applied. Refusing them all would end a
    run that learns.
    """

    name = "non-finite"

    def __init__(self) -> None:
        self._without_gradient: list[int] = []
        """The last steps at which the loss alone was not finite."""
        self._told = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for each of the four that is not finite."""
        if signals.all_finite:
            return ()
        found = []
        who = _who(signals.bad_ranks)
        loss_is_bad = not math.isfinite(signals.loss)
        if loss_is_bad:
            where = tuple(f"micro-batch {i}" for i in signals.bad_micro_batches) if len(signals.losses) > 1 else ()
            what, grave = f"the loss is {_word(signals.loss)}{who}", self._grave(signals)
            if grave != "critical":
                what += " again while every gradient is finite: a term of the loss has no gradient"
            found.append(self._finding(signals, grave, signals.loss, what, where))
        if not math.isfinite(signals.grad_norm):
            routine = signals.scaled and not loss_is_bad
            what = f"the gradient norm is {_word(signals.grad_norm)}"
            severity: Severity = "info" if routine else "critical"
            found.append(self._finding(signals, severity, signals.grad_norm, what, signals.bad_tensors))
        if signals.bad_buffers:
            what = f"a buffer is non-finite{who}"
            found.append(self._finding(signals, "critical", math.inf, what, signals.bad_buffers))
        if not math.isfinite(signals.lr):
            found.append(
                self._finding(signals, "critical", signals.lr, f"the learning rate is {_word(signals.lr)}", ())
            )
        return tuple(found)

    def _grave(self, signals: Signals) -> Severity:
        """How bad a loss is that is not finite."""
        if not math.isfinite(signals.grad_norm) or signals.bad_buffers or signals.input_finite is False:
            return "critical"
        recent = [step for step in self._without_gradient if signals.step - step < _WITHIN]
        self._without_gradient = [*recent[1 - _TOLERATED_AFTER :], signals.step]
        if len(self._without_gradient) < _TOLERATED_AFTER:
            return "critical"
        told, self._told = self._told, True
        return "info" if told else "warn"

    def _finding(
        self, signals: Signals, severity: Severity, value: float, what: str, where: tuple[str, ...]
    ) -> Finding:
        return Finding(
            detector=self.name,
            step=signals.step,
            severity=severity,
            value=value,
            limit=_LARGEST,
            what=what,
            where=where,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"without_gradient": list(self._without_gradient), "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._without_gradient = [int(step) for step in state.get("without_gradient", ())]
        self._told = bool(state.get("told", False))


def _who(ranks: tuple[int, ...]) -> str:
    """Nothing in a run of one process."""
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:3])) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
    return f" on rank {shown}" if len(ranks) == 1 else f" on ranks {shown}"


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"


_NOTHING: tuple[Finding, ...] = ()
_CALIBRATION_STEPS = 200
_CUTS = 3
_WITHIN_STEPS = 50
_HELD_STEPS = 8  # at one scale: it has been found, and what comes after is no search for it
_EARLY_CUTS, _WITHIN_EARLY = 5, 20  # in the first 200 steps gradients still grow, and single cuts follow them
_LOWEST = 1.0


@final
class LossScale:
    """Warns when an fp16 loss scale is cut three times within 50 steps, or falls below 1.

    A healthy scaler cuts about once per 2000 steps, after it tried to grow. Its first 200 steps are calibration, where
    it takes five cuts within 20 steps after a scale that has held for 8. In GLM-130B and BLOOM-104B the scale fell 30
    to 1500 steps before the loss showed anything.

    Args:
        quiet_steps: steps between two findings.
    """

    name = "loss-scale"

    def __init__(self, *, quiet_steps: int = 500) -> None:
        self._quiet_steps = quiet_steps
        self._steps = 0
        self._scale: float | None = None
        self._cuts: list[int] = []
        self._early: list[int] = []
        self._since = 0
        """When the scale became what it is."""
        self._found = False
        self._until = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return at most one finding, at a step whose scale differs from the one before."""
        if not signals.scaled:
            return _NOTHING
        self._steps += 1
        return _NOTHING if signals.scale == self._scale else self._changed(signals)

    def _changed(self, signals: Signals) -> tuple[Finding, ...]:
        scale, before = signals.scale, self._scale
        if not math.isfinite(scale):
            return _NOTHING
        self._scale = scale
        self._found = self._found or (before is not None and self._steps - self._since >= _HELD_STEPS)
        self._since = self._steps
        if before is not None and scale < before:
            self._cut()
        if self._steps < self._until:
            return _NOTHING
        if scale < _LOWEST:
            return self._say(signals, scale, _LOWEST, f"the loss scale fell to {scale:g}: small gradients underflow")
        if len(self._cuts) >= _CUTS:
            what = f"the loss scale was reduced {len(self._cuts)} times within {_WITHIN_STEPS} steps, to {scale:g}"
            return self._say(signals, float(len(self._cuts)), float(_CUTS), what)
        if len(self._early) >= _EARLY_CUTS:
            what = f"the loss scale was reduced {len(self._early)} times within {_WITHIN_EARLY} steps, to {scale:g}"
            return self._say(signals, float(len(self._early)), float(_EARLY_CUTS), what)
        return _NOTHING

    def _cut(self) -> None:
        if self._steps > _CALIBRATION_STEPS:
            self._early = []
            self._cuts = [step for step in self._cuts if step > self._steps - _WITHIN_STEPS]
            self._cuts.append(self._steps)
        elif self._found:
            self._early = [step for step in self._early if step > self._steps - _WITHIN_EARLY]
            self._early.append(self._steps)

    def _say(self, signals: Signals, value: float, limit: float, what: str) -> tuple[Finding, ...]:
        self._until = self._steps + self._quiet_steps
        return (Finding(detector=self.name, step=signals.step, severity="warn", value=value, limit=limit, what=what),)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "steps": self._steps,
            "scale": self._scale,
            "cuts": list(self._cuts),
            "early": list(self._early),
            "since": self._since,
            "found": self._found,
            "until": self._until,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._steps, self._until = int(state["steps"]), int(state["until"])
        self._scale = None if state["scale"] is None else float(state["scale"])
        self._cuts = [int(step) for step in state["cuts"]]
        self._early = [int(step) for step in state.get("early", ())]
        self._since, self._found = int(state.get("since", 0)), bool(state.get("found", False))


_FACTOR = 1000.0  # at a momentum of 0.1 the batch's own variance is ten thousand times the usual one
_ARMED_AFTER = 32
_PATIENCE = 3  # findings in a row, after which it is the data's new scale


@final
class BufferJump:
    """Asks for action when a buffer's largest value jumps to a thousand times its largest so far."""

    name = "buffer-jump"
    needs = "buffer_peaks"

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._in_a_row = 0

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return one finding for all buffers that jumped."""
        if not signals.buffer_peaks:
            return ()
        leaps: dict[str, float] = {}
        for name, peak in zip(signals.buffers, signals.buffer_peaks, strict=False):
            largest = self._largest.get(name, 0.0)
            if not 0.0 < peak < math.inf:
                continue
            armed = largest and (self._seen[name] >= _ARMED_AFTER or (is_absurd(peak) and not is_absurd(largest)))
            if armed and peak > _FACTOR * largest:
                leaps[name] = peak / largest
            else:
                self._largest[name] = max(largest, peak)
                self._seen[name] = self._seen.get(name, 0) + 1
        if not leaps:
            self._in_a_row = 0
            return ()
        self._in_a_row += 1
        if self._in_a_row > _PATIENCE:
            peaks = dict(zip(signals.buffers, signals.buffer_peaks, strict=False))
            self._largest |= {name: peaks[name] for name in leaps}
            return ()
        worst = max(leaps, key=leaps.__getitem__)
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="act",
                value=leaps[worst] * self._largest[worst],
                limit=_FACTOR * self._largest[worst],
                baseline=self._largest[worst],
                what=f"after this forward pass {worst} is {leaps[worst]:.1e} times larger than ever before",
                where=tuple(leaps),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"largest": dict(self._largest), "seen": dict(self._seen), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._largest = {str(name): float(value) for name, value in state["largest"].items()}
        self._seen = {str(name): int(count) for name, count in state["seen"].items()}
        self._in_a_row = int(state["in_a_row"])
