"""The gate: NaN or infinity in the loss, in a gradient, in a buffer the forward pass wrote, or in the learning rate."""

import math
from typing import Any, final

from steadystep.records import Finding, Severity, Signals

_LARGEST = 3.4028234663852886e38  # fp32


@final
class NonFinite:
    """Loss, gradients and buffers are told apart: each can be bad while the others look healthy.

    With a loss scaler, overflowing gradients under a finite loss are the scaler's routine and only worth a note.
    """

    name = "non-finite"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for each of the four that is not finite."""
        if signals.healthy:
            return ()
        found = []
        who = _who(signals.bad_ranks)
        loss_is_bad = not math.isfinite(signals.loss)
        if loss_is_bad:
            where = tuple(f"micro-batch {i}" for i in signals.bad_micro_batches) if len(signals.losses) > 1 else ()
            found.append(
                self._finding(signals, "critical", signals.loss, f"the loss is {_word(signals.loss)}{who}", where)
            )
        if not math.isfinite(signals.grad_norm):
            routine = signals.scaled and not loss_is_bad
            what = f"the gradient norm is {_word(signals.grad_norm)}"
            severity: Severity = "info" if routine else "critical"
            found.append(self._finding(signals, severity, signals.grad_norm, what, signals.bad_tensors))
        if signals.bad_buffers:
            what = f"a buffer written by the forward pass is not finite{who}"
            found.append(self._finding(signals, "critical", math.inf, what, signals.bad_buffers))
        if not math.isfinite(signals.lr):
            found.append(
                self._finding(signals, "critical", signals.lr, f"the learning rate is {_word(signals.lr)}", ())
            )
        return tuple(found)

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
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue."""


def _who(ranks: tuple[int, ...]) -> str:
    """Nothing in a run of one process."""
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:3])) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
    return f" on rank {shown}" if len(ranks) == 1 else f" on ranks {shown}"


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"
