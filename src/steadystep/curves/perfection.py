"""A loss too good to be true: exactly zero, or zero because a logger puts zero in the place of NaN."""

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.reading import Pattern

_FEWEST = 3
_IN_A_ROW = 16
_REAL = 1e-3  # a loss that was above this was measuring something
_FELL = 100.0  # times, from one logged point to the next: nothing learns that quickly

_LEAK = (
    "look for the target among the inputs, for a mask that hides every target, and for a loss that no longer depends "
    "on the prediction"
)
_FILTER = (
    "the Hugging Face Trainer logs 0 for a NaN loss unless logging_nan_inf_filter=False: set that, and treat the run "
    "as one that became NaN here: go back to an earlier checkpoint, lower the learning rate, use bf16 instead of fp16"
)


def perfection(curve: Curve) -> list[Pattern]:
    """Losses of exactly zero."""
    loss = curve.run.loss
    zero = loss.values == 0.0
    if zero.sum() < _FEWEST or curve.name != "loss":
        return []
    first = int(np.argmax(zero))
    step = int(loss.steps[first])
    before = loss.values[:first][np.isfinite(loss.values[:first])]
    was = float(np.median(before[-16:])) if len(before) else 0.0
    norms = curve.run.grad_norm
    beside = norms.values[np.isin(norms.steps, loss.steps[zero])]
    count = int(zero.sum())
    lasting = bool(zero[first:].mean() > 0.9)
    until = None if lasting else int(loss.steps[np.flatnonzero(zero)[-1]])
    told = f"the loss is exactly 0 at {count} points from step {step} on" + (f", after {was:.4g}" if was else "")
    if len(beside) and np.mean(~np.isfinite(beside)) > 0.5:
        evidence = f"{told}, and the gradient norm there is NaN: a log filter has put 0 in the place of NaN"
        return [
            Pattern(kind="hidden-nan", severity="critical", step=step, until=until, evidence=evidence, advice=_FILTER)
        ]
    if was > _REAL and curve.run.source == "transformers" and lasting and before[-1] > _REAL:
        evidence = f"{told}, from one logged point to the next: most likely NaN, for which the Trainer logs 0"
        return [
            Pattern(kind="hidden-nan", severity="critical", step=step, until=until, evidence=evidence, advice=_FILTER)
        ]
    if not lasting or count < _IN_A_ROW:
        return []
    sudden = len(before) and before[-1] > _REAL
    evidence = told + (", from one logged point to the next" if sudden else "")
    return [
        Pattern(kind="suspicious-perfection", severity="warn", step=step, until=until, evidence=evidence, advice=_LEAK)
    ]
