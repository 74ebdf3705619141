"""Units that put out nothing for any example of a batch: no gradient will ever wake them."""

from typing import Any, final

from steadystep.detectors.runs import Runs
from steadystep.records import Finding, Signals

_LIMIT = 0.7
_QUIET_STEPS = 4  # the first probes follow each other too closely to count as lasting


@final
class DeadUnits:
    """Warns once for each activation that has more than 70 % dead units in three probes in a row."""

    name = "dead-units"
    only_probes = True

    def __init__(self) -> None:
        self._runs = Runs(3)

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all activations that have just proved dead."""
        probe = signals.probe
        if probe is None or not probe.dead or probe.step <= _QUIET_STEPS:
            return ()
        shares = dict(zip(probe.modules, probe.dead, strict=False))
        where = self._runs.add({name: share > _LIMIT for name, share in shares.items()})
        if not where:
            return ()
        worst = max(shares[name] for name in where)
        return (
            Finding(
                detector=self.name,
                step=signals.step,
                severity="warn",
                value=worst,
                limit=_LIMIT,
                what=f"up to {worst:.0%} of the units of an activation are zero for whole batches",
                where=where,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return self._runs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._runs.load_state_dict(state)
