"""What the probes of a run have shown about its layers."""

import math
from statistics import median
from typing import Any, final

from steadystep.records import Probe

_MOST = 128


@final
class Layers:
    """Update-to-weight ratios over the run, and the first and the last probe as they are.

    Biases start at zero and change by their whole size, so they do not count unless there is nothing else.
    """

    __slots__ = ("_stride", "_until", "first", "highest", "last", "ratios")

    def __init__(self) -> None:
        self._stride = 1
        self._until = 0
        self.ratios: list[float] = []
        """Median over the tensors, of every n-th probe."""
        self.highest = 0.0
        """The largest ratio of any tensor in those probes."""
        self.first: Probe | None = None
        self.last: Probe | None = None

    def add(self, probe: Probe) -> None:
        """One more probe."""
        self.last = probe
        self.first = self.first or probe
        self._until -= 1
        if self._until > 0:
            return
        self._until = self._stride
        ratios = update_ratios(probe)
        if ratios:
            self.ratios.append(median(ratios))
            self.highest = max(self.highest, *ratios)
        if len(self.ratios) == _MOST:
            del self.ratios[1::2]
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "stride": self._stride,
            "until": self._until,
            "ratios": list(self.ratios),
            "highest": self.highest,
            "first": None if self.first is None else self.first.to_json(),
            "last": None if self.last is None else self.last.to_json(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._stride, self._until = int(state["stride"]), int(state["until"])
        self.ratios = [float(ratio) for ratio in state["ratios"]]
        self.highest = float(state["highest"])
        self.first = None if state["first"] is None else Probe.from_json(state["first"])
        self.last = None if state["last"] is None else Probe.from_json(state["last"])


def update_ratios(probe: Probe) -> list[float]:
    """How much of its size each weight changed by; all tensors when there are only biases."""
    found = {}
    for name, weight, update in zip(probe.names, probe.weight_rms, probe.update_rms, strict=False):
        if weight > 0.0 and math.isfinite(update / weight):
            found[name] = update / weight
    return [ratio for name, ratio in found.items() if not is_bias(name)] or list(found.values())


def is_bias(name: str) -> bool:
    """By its name, as torch spells it."""
    return "bias" in name.rpartition(".")[2]
