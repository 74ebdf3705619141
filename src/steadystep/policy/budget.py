"""How much trouble is too much."""

from typing import Any, final

from steadystep.errors import TrainingHalted
from steadystep.policy.episode import Episode
from steadystep.records import Damage, Diagnosis, Outcome
from steadystep.words import state_of

_SKIP_WINDOW = 200  # attempts
_ROLLBACK_WINDOW = 1000  # attempts
_AGAIN_STEPS = 500  # a rollback this soon after another one means that the last one did not go back far enough


@final
class Budget:
    """Counts refused updates and rollbacks in a window; each kind has a limit of its own."""

    def __init__(self, *, max_skips_in_a_row: int = 20, max_skips: int = 100, max_rollbacks: int = 3) -> None:
        self.max_skips_in_a_row = max_skips_in_a_row
        self.max_skips = max_skips
        self.max_rollbacks = max_rollbacks
        self.skips_in_a_row = 0
        self.refused_in_a_row = 0
        """As `skips_in_a_row`, without the overflows that are a loss scaler's routine."""
        self.episode = Episode()
        self._skips: list[int] = []
        self._rollbacks: list[tuple[int, int]] = []
        self._raised: list[int] = []

    def see(self, diagnosis: Diagnosis) -> None:
        """Take in what was found, before deciding about it."""
        if diagnosis.findings:
            self.episode.note(diagnosis.findings)

    def skips_spent(self, step: int) -> bool:
        """One more refusal would be the one too many."""
        recent = sum(step - skip < _SKIP_WINDOW for skip in self._skips)
        return self.skips_in_a_row + 1 >= self.max_skips_in_a_row or recent + 1 >= self.max_skips

    def rollbacks_spent(self, step: int) -> bool:
        """No rollback is left in this window."""
        return sum(step - at < _ROLLBACK_WINDOW for at, _ in self._rollbacks) >= self.max_rollbacks

    def rollbacks_left(self, step: int) -> int:
        """How many may still be made in this window."""
        return self.max_rollbacks - sum(step - at < _ROLLBACK_WINDOW for at, _ in self._rollbacks)

    def raised(self, step: int) -> int:
        """Book an exception at `step`; returns how many there were in the last 1,000 steps, this one included."""
        self._raised = [*(at for at in self._raised if step - at < _ROLLBACK_WINDOW), step]
        return len(self._raised)

    def last_target(self, step: int) -> int | None:
        """Where the last rollback went, if that is so recent that it has not helped."""
        at, to = self._rollbacks[-1] if self._rollbacks else (0, 0)
        return to if self._rollbacks and step - at < _AGAIN_STEPS else None

    def count(self, outcome: Outcome) -> None:
        """Book the outcome of one attempt."""
        if outcome.stepped:
            self.skips_in_a_row = self.refused_in_a_row = 0
            return
        if outcome.plan.to is not None and outcome.restored is not None:
            self._rollbacks = [*self._rollbacks[-20:], (outcome.step, outcome.plan.to)]
            self.skips_in_a_row = self.refused_in_a_row = 0
            self.episode.close()
            return
        self.skips_in_a_row += 1
        self.refused_in_a_row += "back-off-scale" not in outcome.plan.steps
        self._skips = [*(skip for skip in self._skips if outcome.step - skip < _SKIP_WINDOW), outcome.step]

    def halt(self, outcome: Outcome) -> TrainingHalted:
        """The error that ends the run."""
        did = [f"refused {self.skips_in_a_row} updates in a row" if self.skips_in_a_row > 1 else "refused the update"]
        recent = [to for at, to in self._rollbacks if outcome.step - at < _ROLLBACK_WINDOW]
        if recent:
            did.insert(0, f"rolled back to {', '.join(state_of(to) for to in recent)}")
        where = "the weights are those after the last update that was taken"
        if outcome.restored is not None and outcome.plan.to is not None:
            where = f"{state_of(outcome.plan.to)} is in place"
        elif outcome.diagnosis.damage is Damage.WEIGHTS:
            where = "no better weights are in memory or in a checkpoint of this run: go back to one of yours"
        where += f"; {outcome.incident} has this step to run again" if outcome.incident else ""
        return TrainingHalted(
            step=outcome.step,
            what=f"{outcome.diagnosis.evidence} [{outcome.diagnosis.cause}]" + _began(outcome),
            did=f"{', '.join(did)}; {where}",
            try_next=outcome.diagnosis.advice,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "skips_in_a_row": self.skips_in_a_row,
            "refused_in_a_row": self.refused_in_a_row,
            "skips": list(self._skips),
            "rollbacks": [list(pair) for pair in self._rollbacks],
            "raised": list(self._raised),
            "episode": self.episode.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.skips_in_a_row = int(state["skips_in_a_row"])
        self.refused_in_a_row = int(state["refused_in_a_row"])
        self._skips = [int(step) for step in state["skips"]]
        self._rollbacks = [(int(at), int(to)) for at, to in state["rollbacks"]]
        self._raised = [int(step) for step in state.get("raised", ())]
        self.episode.load_state_dict(state["episode"])


def _began(outcome: Outcome) -> str:
    return f"; origin: {outcome.origin}" if outcome.origin else ""
