"""The gate: NaN or infinity in the loss, in a gradient, in a buffer the forward pass wrote, or in the learning rate."""

import math
from typing import Any, final

from steadystep.records import Finding, Severity, Signals

_LARGEST = 3.4028234663852886e38  # fp32
_TOLERATED_AFTER, _WITHIN = 3, 200  # losses with finite gradients; steps


@final
class NonFinite:
    """Loss, gradients and buffers are told apart: each can be bad while the others look healthy.

    With a loss scaler, overflowing gradients under a finite loss are the scaler's routine and only worth a note. A loss
    that is NaN again and again while every gradient is finite has a term without a gradient (a logged extra, a masked
    log of 0): the third time within 200 steps it is said, and from then on such updates are taken. Refusing them all
    would end a run that learns.
    """

    name = "non-finite"

    def __init__(self) -> None:
        self._without_gradient: list[int] = []
        """The last steps at which the loss alone was not finite."""
        self._told = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for each of the four that is not finite."""
        if signals.healthy:
            return ()
        found = []
        who = _who(signals.bad_ranks)
        loss_is_bad = not math.isfinite(signals.loss)
        if loss_is_bad:
            where = tuple(f"micro-batch {i}" for i in signals.bad_micro_batches) if len(signals.losses) > 1 else ()
            what, grave = f"the loss is {_word(signals.loss)}{who}", self._grave(signals)
            what += "" if grave == "critical" else " and every gradient is finite, again: a term without a gradient"
            found.append(self._finding(signals, grave, signals.loss, what, where))
        if not math.isfinite(signals.grad_norm):
            routine = signals.scaled and not loss_is_bad
            what = f"the gradient norm is {_word(signals.grad_norm)}"
            severity: Severity = "info" if routine else "critical"
            found.append(self._finding(signals, severity, signals.grad_norm, what, signals.bad_tensors))
        if signals.bad_buffers:
            what = f"a buffer is not finite{who}"
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
        """JSON-ready state."""
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
