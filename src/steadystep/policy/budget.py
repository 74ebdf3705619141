"""How much trouble is too much."""

from typing import Any, final

from steadystep.errors import TrainingHalted
from steadystep.records import Outcome


@final
class Budget:
    """Counts refused updates one after another; an accepted one settles the account."""

    def __init__(self, max_skips_in_a_row: int) -> None:
        self.max_skips_in_a_row = max_skips_in_a_row
        self.skips_in_a_row = 0

    @property
    def spent(self) -> bool:
        """One more refusal would be the one too many."""
        return self.skips_in_a_row + 1 >= self.max_skips_in_a_row

    def count(self, *, stepped: bool) -> None:
        """Book the outcome of one attempt."""
        self.skips_in_a_row = 0 if stepped else self.skips_in_a_row + 1

    def halt(self, outcome: Outcome) -> TrainingHalted:
        """The error that ends the run."""
        return TrainingHalted(
            step=outcome.step,
            what=outcome.diagnosis.evidence,
            did=f"refused {self.skips_in_a_row} updates in a row; the last good weights are in place",
            try_next=outcome.diagnosis.advice,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"skips_in_a_row": self.skips_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.skips_in_a_row = int(state["skips_in_a_row"])
