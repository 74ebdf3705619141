"""What happened in one run, from the first step of the fault on and before it."""

from collections import Counter
from typing import Any, final

from steadystep.lab.bench.faulty.trainer import Tick
from steadystep.lab.bench.rules import RULES


@final
class Diary:
    """First words and acts; and, where samples come, what each rule would have said."""

    def __init__(self, first: int, *, num_steps: int, adam: bool) -> None:
        self._first = first
        self._rules = {name: info.make(num_steps) for name, info in RULES.items() if adam or not info.only_adam}
        self._steps = 0
        self._did: Counter[str] = Counter()
        self._row: dict[str, Any] = {"noticed": None, "said": "", "acted": None, "loud_before": 0, "acts_before": 0}
        self._alarms: dict[str, int] = {}
        self._before: Counter[str] = Counter()

    def note(self, tick: Tick) -> None:
        """One more step."""
        step, self._steps = self._steps, self._steps + 1
        self._did.update(tick.did)
        if step < self._first:
            self._row["loud_before"] += bool(tick.loud)
            self._row["acts_before"] += bool(tick.did)
        else:
            if self._row["noticed"] is None and (tick.loud or tick.did):
                self._row |= {"noticed": step, "said": tick.loud or ", ".join(tick.did)}
            if self._row["acted"] is None and tick.did:
                self._row["acted"] = step
        if tick.sample is not None:
            for name, rule in self._rules.items():
                if rule.update(tick.sample).alarm:
                    if step < self._first:
                        self._before[name] += 1
                    else:
                        self._alarms.setdefault(name, step)

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return self._row | {
            "did": dict(self._did),
            "steps": self._steps,
            "alarms": self._alarms,
            "alarms_before": dict(self._before),
        }
