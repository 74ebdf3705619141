"""When the present trouble began."""

from typing import Any, final

from steadystep.records import Finding

_APART_STEPS = 50  # signs further apart than this belong to different troubles


@final
class Episode:
    """Signs of trouble that belong together. A state to go back to must be older than the *first* of them."""

    def __init__(self) -> None:
        self.first_sign: int | None = None
        self._last_sign = 0

    def note(self, findings: tuple[Finding, ...]) -> None:
        """Take in what was found at one step; notes do not count as signs."""
        signs = [f for f in findings if f.severity != "info"]
        if not signs:
            return
        step = signs[0].step
        began = min(step if f.since is None else f.since for f in signs)
        if self.first_sign is None or step - self._last_sign > _APART_STEPS:
            self.first_sign = began
        self.first_sign = min(self.first_sign, began)
        self._last_sign = step

    def open(self, step: int) -> bool:
        """Whether a sign was seen a short while ago."""
        return self.first_sign is not None and step - self._last_sign <= _APART_STEPS

    def close(self) -> None:
        """The trouble was dealt with."""
        self.first_sign = None

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"first_sign": self.first_sign, "last_sign": self._last_sign}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        first = state["first_sign"]
        self.first_sign, self._last_sign = None if first is None else int(first), int(state["last_sign"])
