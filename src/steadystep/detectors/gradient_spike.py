"""A gradient far above the run's own level, seen before the update lands.

Gradient norms are log-normal to a good approximation, their level drifts over a run, and healthy runs have blips that
heal by themselves; some have heavy tails, and blips of a hundred times the median. So: logarithms, a window, outliers
are not learned, and a limit that follows the tail of this very run.
"""

import math
from collections import deque
from typing import Any, Literal, final

from steadystep.records import Finding, Signals
from steadystep.stats import Level, Tail

_REMEMBERED = 8  # looks at the single tensors
_REMEMBER_EVERY = 16  # steps
_TOGETHER = 0.6  # of the limit: enough when nearly all tensors rose alike while the loss is as usual
_ALIKE = 0.5  # of the whole norm's rise: four tensors in five must have risen by so much
_CALM = 2.0  # sigma of the loss: as usual
_OUTLIER = math.log(3.0)  # above the median: where the tail begins
_LIGHT = 3  # exceedances of nothing: what reaches all tensors while the loss is as usual is rare in any run
_PARTLY = 3.0  # times the factor: what single tensors may do, without all others rising alike
_EXPLAINED = 10.0  # times the factor: what a batch may do whose loss is high too, such as one with a single sample
_FAMILIAR = 10.0  # times the factor: what may happen below the largest update that this run has survived
_RECENT = 16  # accepted norms: a spike stands out from its neighbours too, a burst does not
_ABOVE_RECENT = math.log(3.0)
_AGREEMENT = math.log(4.0)
_SETTLED = 128  # steps; before, the first features form and norms leap: the limit is 1 + 128 / steps times as high
_HARMLESS = 1.0  # sigma of the loss: what the mean of the last eight may be above its median
_TOO_MUCH = math.log(4.0)  # of the size at which harm showed
_RISE = math.log(2.0) / 16.0  # per harmless update: how fast a lasting new level is let in

_Kind = Literal["info", "act"]


@final
class GradientSpike:
    """Asks for action when the norm exceeds `factor` times its median, `deviations` sigma of its log, and the tail.

    A spike that reaches all tensors alike while the loss is as usual is not caused by the batch: it counts from 0.6
    times the factor on, beside the tail of such steps. It takes three times the factor where single tensors rise, and
    ten times where the loss is high too or where the update (norm times learning rate) is no larger than others that
    this run has taken. Where the user's own clipping brings the norm below the limit, the finding is a note.

    Outliers that last are accepted step by step: twelve in a row that agree are scaled down to the usual norm, and that
    limit doubles every sixteen updates for as long as the loss does not rise; where it does, a quarter of that is the
    most from then on.

    Args:
        factor: multiple of the median norm that counts as a spike.
        deviations: standard deviations of the logarithm of the norm that it must exceed as well.
        history: number of past norms to compare with.
        clipped_to: the user's own clipping limit.
    """

    name = "gradient-spike"

    def __init__(
        self, *, factor: float = 10.0, deviations: float = 8.0, history: int = 128, clipped_to: float = math.inf
    ) -> None:
        self._factor = math.log(factor)
        self._gate = math.log(factor * _TOGETHER)
        self._deviations = deviations
        self._clipped_to = clipped_to
        self._level = Level(history)
        self._losses = Level(history)
        self._tail = Tail(above=_OUTLIER)
        self._calm_tail = Tail(above=_OUTLIER, light=_LIGHT)
        """Of steps whose loss was as usual, without outliers of a few tensors: what those do says nothing of all."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._tensors: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED)
        self._until_next = 0
        self._learned = 0
        self._largest_update = 0.0
        self._since: deque[float] = deque(maxlen=_RECENT // 2)
        """Losses, while a new level is being let in."""
        self._bearable, self._borne, self._calmed = math.inf, 0, 0
        self._admitted: float | None = None
        """While a new level is being let in: the logarithm of the norm that updates are held down to."""

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        """Return a finding when this gradient norm is an outlier of its own history."""
        norm = signals.grad_norm
        if not 0.0 < norm < math.inf:
            return ()  # nothing to compare, or the non-finite gate's business
        log_norm, level = math.log(norm), self._level
        if not level.armed or log_norm - level.median <= self._gate:
            self._learn(log_norm, signals)
            return ()
        return self._judge(log_norm, signals)

    def _learn(self, log_norm: float, signals: Signals) -> None:
        norms = signals.norms
        self._learned += 1
        self._calmed += 1
        if self._calmed >= _RECENT:
            self._stop_letting_in()
        if self._level.armed:
            excess = log_norm - self._level.median
            self._tail.learn(excess)
            if self._calm(signals) and (excess <= _OUTLIER or self._is_alike(signals)):
                self._calm_tail.learn(excess)
        self._level.accept(log_norm)
        self._losses.accept(signals.loss)
        self._recent.append(log_norm)
        update = signals.grad_norm * signals.lr
        if self._largest_update < update < math.inf:
            self._largest_update = update
        self._until_next -= 1
        if self._until_next <= 0:
            self._until_next = _REMEMBER_EVERY
            if self._tensors and len(self._tensors[0]) != len(norms):
                self._tensors.clear()
            self._tensors.append(norms)

    def _judge(self, log_norm: float, signals: Signals) -> tuple[Finding, ...]:
        baseline = self._level.median
        if self._admitted is not None:  # why at once: a loss that rises now is no excuse, it may be their doing
            return self._let_in(log_norm, baseline, signals)
        ratios = self._ratios(signals.norms)
        margin = max(self._margin(signals, ratios), max(self._recent, default=baseline) + _ABOVE_RECENT - baseline)
        if log_norm - baseline <= margin:
            self._learn(log_norm, signals)
            return ()
        if self._level.reject(log_norm, agreement=_AGREEMENT, moves=False):
            return self._let_in(log_norm, baseline, signals)
        held = min(signals.grad_norm, self._clipped_to) <= _exp(baseline + margin)
        what = f"the gradient norm is {_exp(log_norm - baseline):.3g} times its baseline of {_exp(baseline):.3g}"
        what += ", limited by your clipping" if held else ""
        worst = [signals.names[i] for ratio, i in reversed(ratios) if ratio > _exp(margin)]
        where = tuple(worst) if len(worst) <= len(ratios) // 2 else ()
        limit = _exp(baseline + margin)
        return (
            self._finding(signals, "info" if held else "act", what, limit=limit, baseline=_exp(baseline), where=where),
        )

    def _let_in(self, log_norm: float, baseline: float, signals: Signals) -> tuple[Finding, ...]:
        """Evidence, not a count, makes a new level: updates of the usual size, and larger ones while those do well."""
        admitted = baseline if self._admitted is None else self._admitted
        self._calmed = 0
        self._since.append(signals.loss)
        if sum(self._since) / len(self._since) <= self._losses.median + _HARMLESS * self._losses.spread:
            admitted = min(admitted + _RISE, self._bearable)
            self._borne += admitted >= log_norm
        else:  # it shows some updates late, so far less than this is what can be borne
            self._bearable = max(baseline, min(self._bearable, admitted - _TOO_MUCH))
            admitted, self._borne = self._bearable, 0
        if self._borne >= _RECENT:
            self._start_again(log_norm)
            what = "the gradient norm has settled at a new level"
            return (self._finding(signals, "info", what, limit=_exp(log_norm), baseline=_exp(baseline)),)
        self._admitted = admitted
        what = f"the gradient norm stays at {_exp(log_norm - baseline):.3g} times its baseline of {_exp(baseline):.3g}"
        held = min(signals.grad_norm, self._clipped_to) <= _exp(admitted)
        kind: _Kind = "info" if held else "act"
        # why this limit: the direction has been the same for a while, so it is used, at a size that is known
        return (self._finding(signals, kind, what, limit=signals.grad_norm, baseline=_exp(admitted)),)

    def _stop_letting_in(self) -> None:
        self._admitted = None
        self._since.clear()
        self._bearable, self._borne = math.inf, 0

    def _start_again(self, log_norm: float) -> None:
        self._level.start_again([log_norm])
        self._recent.clear()
        self._recent.append(log_norm)
        self._tensors.clear()
        self._stop_letting_in()

    def _margin(self, signals: Signals, ratios: list[tuple[float, int]]) -> float:
        """How far above its median the logarithm of this norm may be."""
        young = math.log1p(_SETTLED / max(self._learned, 1))
        raised = signals.loss - self._losses.median
        single = len(signals.norms) == 1  # a logged curve, or flat parameters: whether all rose alike cannot be told
        spread = self._deviations * self._level.spread
        if self._calm(signals) and self._is_alike(signals, ratios):
            young = 0.0 if self._learned >= _SETTLED else young
            least = self._factor if single else self._gate
            return young + max(least, _TOGETHER * spread, self._calm_tail.limit)
        times = 1.0 if single else _PARTLY
        times = _FAMILIAR if signals.grad_norm * signals.lr <= self._largest_update else times
        times = _EXPLAINED if raised > 4.0 * self._losses.spread else times
        return young + max(self._factor + math.log(times), spread, self._tail.limit)

    def _calm(self, signals: Signals) -> bool:
        return signals.loss - self._losses.median <= _CALM * self._losses.spread

    def _is_alike(self, signals: Signals, ratios: list[tuple[float, int]] | None = None) -> bool:
        """No batch does that: it reaches some tensors more than others."""
        ratios = self._ratios(signals.norms) if ratios is None else ratios
        rise = signals.grad_norm / _exp(self._level.median)
        return bool(ratios) and ratios[len(ratios) // 5][0] >= _ALIKE * rise

    def _ratios(self, norms: tuple[float, ...]) -> list[tuple[float, int]]:
        """Each tensor's norm over its own usual one, rising, with its position. Only looked at when in doubt."""
        if not self._tensors or len(self._tensors[0]) != len(norms):
            return []
        found = []
        for i, norm in enumerate(norms):
            baseline = sorted(seen[i] for seen in self._tensors)[len(self._tensors) // 2]
            if baseline > 0.0 and math.isfinite(norm):
                found.append((norm / baseline, i))
        return sorted(found)

    def _finding(
        self,
        signals: Signals,
        severity: _Kind,
        what: str,
        *,
        limit: float,
        baseline: float,
        where: tuple[str, ...] = (),
    ) -> Finding:
        return Finding(
            detector=self.name,
            step=signals.step,
            severity=severity,
            value=signals.grad_norm,
            limit=limit,
            baseline=baseline,
            what=what,
            where=where,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        return {
            "level": self._level.state_dict(),
            "losses": self._losses.state_dict(),
            "tail": self._tail.state_dict(),
            "calm_tail": self._calm_tail.state_dict(),
            "recent": list(self._recent),
            "since": list(self._since),
            "bearable": None if self._bearable == math.inf else self._bearable,
            "counted": [self._borne, self._calmed],
            "tensors": [list(norms) for norms in self._tensors],
            "until_next": self._until_next,
            "learned": self._learned,
            "largest_update": self._largest_update,
            "admitted": self._admitted,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._level.load_state_dict(state["level"])
        self._losses.load_state_dict(state["losses"])
        self._tail.load_state_dict(state["tail"])
        self._calm_tail.load_state_dict(state["calm_tail"])
        self._recent.clear()
        self._recent.extend(float(value) for value in state["recent"])
        self._since.clear()
        self._since.extend(float(value) for value in state["since"])
        self._bearable = math.inf if state["bearable"] is None else float(state["bearable"])
        self._borne, self._calmed = (int(count) for count in state["counted"])
        self._tensors.clear()
        self._tensors.extend(tuple(float(norm) for norm in norms) for norms in state["tensors"])
        self._until_next, self._learned = int(state["until_next"]), int(state["learned"])
        self._largest_update = float(state["largest_update"])
        self._admitted = None if state["admitted"] is None else float(state["admitted"])


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # a limit beyond 1e304 is no limit, and no reason to raise
