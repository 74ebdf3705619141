"""When the present trouble began."""

from dataclasses import replace
from typing import Any, final

from steadystep.records import Finding

_APART_STEPS = 50  # signs further apart than this belong to different troubles
_LONGEST_STEPS = 300  # and so do a first and a last one this far apart: bad batches may come for ever
_CALM_STEPS = 10


@final
class Episode:
    """Signs of trouble that belong together. A state to go back to must be older than the *first* of them."""

    def __init__(self) -> None:
        self.first_sign: int | None = None
        self._last_sign = 0
        self._suspected: int | None = None
        self._suspected_at = 0
        self._confirmed_at: int | None = None
        self._foretold_at: int | None = None

    def note(self, findings: tuple[Finding, ...]) -> None:
        """Take in what was found at one step; a sign is what asks for action."""
        for finding in findings:
            if finding.detector == "slow-divergence":
                self._suspected, self._suspected_at = finding.since, finding.step
            if finding.severity != "info" and finding.detector != "non-finite":
                self._foretold_at = finding.step
        signs = [f for f in findings if f.severity in ("act", "critical")]
        if not signs:
            return
        step = signs[0].step
        began = min(step if f.since is None else f.since for f in signs)
        apart = step - self._last_sign > _APART_STEPS
        if self.first_sign is None or apart or step - self.first_sign > _LONGEST_STEPS:
            self.first_sign = began
        self.first_sign = min(self.first_sign, began)
        self._last_sign = step

    def twice(self, findings: tuple[Finding, ...], weighed: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """A slow divergence that older weights confirm on one batch is a warning at most, and acted on at the second.

        Single batches differ; two that agree do so by chance in one case of many. A suspicion stays one until then.
        """
        return tuple(self._second(*pair) for pair in zip(findings, weighed, strict=True))

    def _second(self, finding: Finding, weighed: Finding) -> Finding:
        if finding.detector != "slow-divergence" or weighed.severity != "act":
            return weighed
        first, self._confirmed_at = self._confirmed_at, finding.step
        if first is not None and finding.step - first <= _APART_STEPS:
            return weighed
        return finding if finding.severity == "info" else replace(finding, severity="warn")

    def calm(self, step: int) -> bool:
        """Whether the last sign was a while ago, so that it is worth remembering the present state."""
        return self.first_sign is None or step - self._last_sign > _CALM_STEPS

    @property
    def sudden(self) -> bool:
        """From healthy to NaN with nothing before: no learning rate does that, a failing memory cell does."""
        if self.first_sign is None:
            return False
        return self._foretold_at is None or self.first_sign - self._foretold_at > _APART_STEPS

    def suspected_since(self, step: int) -> int | None:
        """When a suspicion began that may yet turn out to be true: a state from before is worth keeping."""
        return self._suspected if step - self._suspected_at <= _APART_STEPS else None

    def close(self) -> None:
        """The trouble was dealt with."""
        self.first_sign = self._suspected = self._confirmed_at = self._foretold_at = None

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "first_sign": self.first_sign,
            "last_sign": self._last_sign,
            "suspected": [self._suspected, self._suspected_at, self._confirmed_at],
            "foretold": self._foretold_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.first_sign, self._last_sign = state["first_sign"], int(state["last_sign"])
        self._suspected, self._suspected_at, self._confirmed_at = state["suspected"]
        self._foretold_at = state["foretold"]
