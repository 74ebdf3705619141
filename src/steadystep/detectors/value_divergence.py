"""A value function that runs away: its errors and values multiply while the reward does not."""

from itertools import islice
from statistics import fmean, median
from typing import Any, final

from steadystep.detectors.policy import NO_METRICS, finding, policy_metrics
from steadystep.records import Finding, Signals

_LONG, _SHORT, _RECENT, _SUDDEN, _LATEST = 256, 32, 16, 4, 2  # readings
_GREW, _ERRED = 10.0, 100.0  # times, within the long window
_LEFT, _BROKE = 1.1, 1.2  # times the largest value and the largest error before
_OF_VALUES = ("value_loss", "value_mean", "explained_variance", "reward")


@final
class ValueDivergence:
    """Warns when the value function runs away: values 10 times and errors 100 times those of 256 readings before.

    Sooner where it breaks: four errors in a row above 1.2 times the largest of 112 readings that are 16 older, while
    values leave the range they had then. Neither where the reward has risen as well. Also when it explains less than a
    constant would (explained variance below -0.5) with ten times its error before.
    """

    name = "value-divergence"
    needs = "metrics"

    def __init__(self) -> None:
        self._kept: dict[str, list[float]] = {name: [] for name in _OF_VALUES}
        self._told = False

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding when errors and values grow without more reward."""
        metrics = policy_metrics(signals) if signals.metrics else NO_METRICS
        if "value_loss" not in metrics:
            return ()
        for name, values in self._kept.items():
            if name in metrics:
                values.append(metrics[name])
            elif name == "reward" and values:  # known now and then: the last one holds
                values.append(values[-1])
            del values[:-_LONG]
        losses = self._kept["value_loss"]
        if len(losses) < _LONG // 2:
            return ()
        before, now = median(losses[:_SHORT]), median(losses[-_SHORT:])
        size = [abs(median(part)) for part in self._ends("value_mean")]
        ran_away = len(size) == 2 and size[1] > _GREW * max(size[0], 1.0) and now > _ERRED * before
        fits = self._kept["explained_variance"][-_SHORT:]
        useless = len(fits) == _SHORT and median(fits) < -0.5 and now > _GREW * before
        broke = not (ran_away or useless) and self._broke()
        if not (ran_away or useless or broke) or self._risen(lately=broke):
            self._told = self._told and now > _GREW * before
            return ()
        if self._told:
            return ()
        self._told = True
        if broke:
            before, now = median(losses[:-_SUDDEN]), median(losses[-_SUDDEN:])
            size = [max(map(abs, self._kept["value_mean"][:-_SUDDEN])), abs(self._kept["value_mean"][-1])]
        what = f"the error of the value function grew from {before:.3g} to {now:.3g}"
        what += f", it explains {median(fits):.2g}" if useless else f", its values from {size[0]:.3g} to {size[1]:.3g}"
        since = signals.step - (_SUDDEN if broke else _SHORT)
        return (finding(self.name, signals.step, "warn", now, _GREW * before, what, baseline=before, since=since),)

    def _broke(self) -> bool:
        """Whether errors stay above all before them, and values leave the range they have had."""
        losses, values = self._kept["value_loss"], self._kept["value_mean"]
        if len(values) < _LONG // 2 or len(self._kept["reward"]) < 2 * _RECENT:
            return False
        if min(losses[-_SUDDEN:]) <= _BROKE * max(losses[-_LONG // 2 : -_RECENT]):  # in nearly every step
            return False
        largest = max(map(abs, islice(values, len(values) - _RECENT)))
        return all(abs(value) > _LEFT * largest for value in values[-_LATEST:])

    def _risen(self, *, lately: bool) -> bool:
        """Whether there is a tenth more reward than there was in the long window, or of its range in 16 readings."""
        known = self._kept["reward"]
        if lately:
            rise = fmean(known[-_LATEST:]) - fmean(known[-2 * _RECENT : -_RECENT])
            return rise > 0.1 * (max(known) - min(known))
        before, now = [fmean(part) for part in self._ends("reward") if part] or [0.0, 0.0]
        return now > before + 0.1 * abs(before)

    def _ends(self, name: str) -> list[list[float]]:
        values = self._kept[name]
        return [values[:_SHORT], values[-_SHORT:]] if len(values) >= _LONG // 2 else []

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {"kept": {name: list(values) for name, values in self._kept.items()}, "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._kept = {name: [float(v) for v in state["kept"].get(name, ())] for name in self._kept}
        self._told = bool(state["told"])
