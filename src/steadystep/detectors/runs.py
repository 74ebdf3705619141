"""How many times in a row each of several names gave cause for concern."""

from collections.abc import Mapping
from typing import Any, final


@final
class Runs:
    """Counts per name; each name is reported once, when its count reaches `patience`."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._counts: dict[str, int] = {}
        self._said: set[str] = set()

    def add(self, concerns: Mapping[str, bool]) -> tuple[str, ...]:
        """The names that have just been of concern often enough in a row. One that is not mentioned keeps its count."""
        reached = []
        for name, concern in concerns.items():
            if not concern:
                self._counts.pop(name, None)
            elif name not in self._said:
                self._counts[name] = self._counts.get(name, 0) + 1
                if self._counts[name] >= self._patience:
                    reached.append(name)
        self._said.update(reached)
        return tuple(reached)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"counts": dict(self._counts), "said": sorted(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._counts = {name: int(count) for name, count in state["counts"].items()}
        self._said = set(state["said"])
