"""Where another process went on: worth knowing, and no spike."""

import numpy as np

from steadystep.curves.curve import Curve
from steadystep.curves.reading import Pattern


def restarts(curve: Curve) -> list[Pattern]:
    """One note for all of them."""
    found = curve.run.restarts
    if not found:
        return []
    places = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
    evidence = f"the run was resumed at step {places}{_jump(curve, found[0])}"
    advice = "nothing; if the loss is higher after a restart, the optimizer's state or the schedule was not restored"
    return [Pattern(kind="restart", severity="info", step=found[0], until=found[-1], evidence=evidence, advice=advice)]


def _jump(curve: Curve, step: int) -> str:
    at = int(np.searchsorted(curve.steps, step))
    if not 3 <= at <= len(curve) - 3:
        return ""
    before, after = np.median(curve.values[max(0, at - 8) : at]), np.median(curve.values[at : at + 8])
    return f" ({curve.name} {before:.4g} before, {after:.4g} after)"
