"""KillLossSpike (llm-foundry): the loss at twice its usual for several steps, or above a cap half of the time."""

from collections import deque
from typing import final

from steadystep.lab.bench.rules.rule import FINE, Sample, Verdict


@final
class KillLossSpike:
    """Only writes to the log unless told otherwise, so its verdict is an alarm and nothing else."""

    def __init__(
        self, *, num_steps: int = 2000, factor: float = 2.0, patience_steps: int = 4, loss_cap: float = 10.0
    ) -> None:
        self._window: deque[float] = deque(maxlen=max(100, round(num_steps * 0.05)))
        self._factor, self._patience_steps, self._loss_cap = factor, patience_steps, loss_cap
        self._high = 0

    def update(self, seen: Sample) -> Verdict:
        """Silent until its window is full."""
        alarm = False
        full = self._window.maxlen
        if len(self._window) == full:
            mean = sum(self._window) / full
            self._high = self._high + 1 if seen.loss >= self._factor * mean else 0
            alarm = self._high > self._patience_steps
            alarm = alarm or sum(x > self._loss_cap for x in self._window) >= full / 2
        self._window.append(seen.loss)
        return Verdict(alarm=True) if alarm else FINE
