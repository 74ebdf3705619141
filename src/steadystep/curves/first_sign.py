"""Which signal came first: gradient norms often leave their level before the loss does (BLOOM-104B: one step)."""

import math

import numpy as np

from steadystep.curves.curve import Curve

_BACK = 64  # points before the loss
_FEWEST = 16  # norms to know their level by
_FACTOR = 3.0
_SIGMAS = 6.0
_MAD = 1.4826


def early_norm(curve: Curve, step: int) -> tuple[int, float] | None:
    """The step at which the gradient norm left its level for good before `step`, or at it, and by what factor."""
    norms = curve.run.grad_norm
    end = int(np.searchsorted(norms.steps, step, side="right"))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(norms.values[max(0, end - 5 * _BACK) : end])
    steps = norms.steps[max(0, end - 5 * _BACK) : end]
    calm = logs[: max(0, len(logs) - _BACK // 4)]
    calm = calm[np.isfinite(calm)]
    if len(calm) < _FEWEST:
        return None
    usual = float(np.median(calm[-2 * _BACK :]))
    spread = float(np.median(np.abs(calm[-2 * _BACK :] - usual))) * _MAD
    limit = usual + max(math.log(_FACTOR), _SIGMAS * spread)
    tail = slice(max(0, len(logs) - _BACK // 4), len(logs))
    high = np.flatnonzero(~(logs[tail] <= limit))
    if not len(high):
        return None
    at = int(high[0])
    top = float(np.max(np.nan_to_num(logs[tail][at:], nan=math.inf, posinf=math.inf)))
    return int(steps[tail][at]), math.exp(min(top - usual, 700.0))


def norm_before(curve: Curve, step: int) -> str:
    """As a clause; empty when the gradient norm said nothing before."""
    found = early_norm(curve, step)
    if found is None:
        return ""
    at, factor = found
    size = f"{factor:.3g} times its level" if factor < 1e6 else "far above its level"
    if at == step:
        return f"the gradient norm rose to {size} at the same step"
    return f"the gradient norm came first: {size} from step {at} on"
