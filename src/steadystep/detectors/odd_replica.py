"""Copies of the weights that should be the same on all ranks and are not: memory or arithmetic has failed somewhere."""

from typing import Any, final

from steadystep.records import REPLICAS_EVERY, Finding, Signals


@final
class OddReplica:
    """Asks for weights from before the last comparison that found no difference. Says nothing in a single process."""

    name = "odd-replica"
    needs = "odd_replicas"

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """One finding for all weights that differ."""
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
                what="weights are not the same on all ranks",
                where=odd,
                since=max(0, signals.step - REPLICAS_EVERY),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue."""
