"""Replays updates that a rollback has undone, and plays rollouts of a policy under earlier weights.

From the restored state on, the remembered batches are run once more with the learning rates of then. The first three
must give the losses they gave: they start from the very same state, so another loss means other data or other random
numbers, and it ends there. What goes exactly as it went is replayed up to the first sign of trouble and no further, or
the damage would be too. What goes better than it went (the weights had been modified outside the optimizer, the moments
were poisoned) is replayed to the end. Where the batches themselves are the trouble, those that are unusual under the
weights of the first sign stay out, in quarantine, and the others are replayed.

Whether it is exact is looked at and not assumed: up to the first sign all that was measured then has to come out bit
for bit, and where a younger state is still there, so has every tensor of it.
"""

import math
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from steadystep._utils.numbers import common_factor
from steadystep._utils.rng import random_numbers_kept
from steadystep._utils.tensors import layout_of, measure
from steadystep.actions import Updater
from steadystep.detectors import Detector, sees_every_step
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.engine.verdict import Ask
from steadystep.parallel import Ranks, SingleProcess
from steadystep.records import Signals
from steadystep.rl import Controls
from steadystep.signals.gradients import GradientView
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.recovery import Recovery
from steadystep.snapshots.replay_buffer import RecordedUpdate

if TYPE_CHECKING:
    from steadystep.engine.reruns import BatchReruns

_SAME_ON_HOST, _SAME_ON_DEVICE = 1e-5, 1e-4
_FOR_NORMS = 100.0  # times: backward adds up more than forward does
_REPEATED = 3  # updates that must go exactly as they went: if not, something else than the damage does not repeat
_NO_WORSE_LOSS, _NO_WORSE_NORM, _WIDE = 0.02, 2.0, 4.0  # above what it was, and twice times what it was
_REPEATS = 1e-3  # of a loss: the same batch under the same weights, at any precision
_FEWEST_UNUSUAL = 3  # batches: one or two outliers are in every run

MeasureGroup = Callable[[Sequence[int]], GradientView]
"""Measures the gradients of some micro-batches of the group at hand."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replayer:
    """Runs remembered updates once more, and shows the detectors what they would have seen."""

    runner: MicroBatchRunner
    updater: Updater
    recovery: Recovery
    detectors: Sequence[Detector]
    device: torch.device
    ranks: Ranks = field(default_factory=SingleProcess)

    def replay(
        self,
        missed: Sequence[RecordedUpdate],
        measure: MeasureGroup,
        *,
        first_sign: int,
        outside: bool = False,
        slack: int = 0,
    ) -> "Replayed":
        """Those that were made, as they went this time.

        With `outside` what repeats goes on past the first sign, with `slack` so many steps.
        """
        made: list[RecordedUpdate] = []
        if not self.ranks.same([len(done.micro_batches) for done in missed]):
            return Replayed(made, healed=False, exact=False)
        healed, exact, compared, baseline = False, True, 0, _Usual(missed, first_sign)
        with random_numbers_kept(self.device) as kept:
            for done in missed:
                seen = self._seen(done, measure)
                if done.signals.step < first_sign:
                    exact = exact and seen is not None and _identical(seen.signals, done.signals)
                    compared += 1
                healed = healed or seen is None or not self._same(seen.signals, done.signals)
                goes_on = self._may_go_on(made, done, first_sign + slack, healed=healed, outside=outside)
                if seen is None or not goes_on or (healed and not baseline.covers(seen, done)):
                    self.updater.undo()
                    break
                self.updater.take_again(seen, done)
                made.append(replace(done, signals=_as_of(done.signals, seen.signals)) if healed else done)
                self._learn(made[-1].signals)
                if not done.is_at_hand:  # after that one the loop does it
                    self.recovery.follow()
                if exact and done.signals.step < first_sign:
                    exact = self.recovery.is_as_it_was(done.updates)
            if made and made[-1].is_at_hand and made[-1].micro_batches[-1].recipe.rng is not None:
                kept.let_go()  # why: the loop goes on after this update, with the numbers that follow its draws
        exact = self.ranks.all(exact and len(made) >= compared >= _REPEATED)
        return Replayed(made, healed=healed, exact=exact)

    def sort_out(
        self,
        rest: Sequence[RecordedUpdate],
        before: Sequence[RecordedUpdate],
        measure: MeasureGroup,
        *,
        known: Container[int] = (),
    ) -> tuple[list[RecordedUpdate], list[RecordedUpdate]]:
        """Of the updates from the first sign on: those that were made, and those whose batches stay in quarantine.

        Both are empty where no batch is unusual for the weights in place: then it was not the data. Those of the steps
        `known` to be bad stay out in any case.
        """
        baseline = _Usual(before, rest[0].signals.step)
        with random_numbers_kept(self.device) as kept:
            unusual = []
            for done in rest:
                seen = None if done.signals.step in known else self._seen(done, measure)
                unusual += [] if seen is not None and baseline.is_usual(seen) else [done]
                self.updater.undo()
            if len(unusual) < _FEWEST_UNUSUAL:
                return [], []
            made: list[RecordedUpdate] = []
            for done in (done for done in rest if done not in unusual):
                seen = self._seen(done, measure)
                if seen is None or not baseline.is_usual(seen):
                    self.updater.undo()
                    unusual.append(done)
                    continue
                self.updater.take_again(seen, done)
                made.append(replace(done, signals=_as_of(done.signals, seen.signals)))
                self._learn(made[-1].signals)
                if not done.is_at_hand:
                    self.recovery.follow()
            if made and made[-1].is_at_hand and made[-1].micro_batches[-1].recipe.rng is not None:
                kept.let_go()
        return made, sorted(unusual, key=lambda done: done.signals.step)

    @staticmethod
    def _may_go_on(
        made: list[RecordedUpdate], done: RecordedUpdate, first_sign: int, *, healed: bool, outside: bool
    ) -> bool:
        if not healed:
            return outside or done.signals.step < first_sign
        # why: from the restored state the first ones cannot go another way, if they are what they were
        return len(made) >= _REPEATED

    def _seen(self, done: RecordedUpdate, measure: MeasureGroup) -> GradientView | None:
        try:
            for work in done.micro_batches:
                closure, batch = work.recipe.again()
                self.runner.add(self.ranks.together(closure), batch=batch, weight=work.weight)
            seen = measure(range(len(done.micro_batches)))
        except Exception:  # the user's code, run at a time they did not expect: whatever it raises means "cannot be"
            return None
        return seen if seen.signals.all_finite else None

    def _learn(self, signals: Signals) -> None:
        """A step that was judged before: only for what detectors remember."""
        for detector in self.detectors:
            if signals.probe is not None or sees_every_step(detector):
                detector.update(signals)

    def _same(self, now: Signals, then: Signals) -> bool:
        tolerance = _SAME_ON_HOST if self.device.type == "cpu" else _SAME_ON_DEVICE
        losses = math.isclose(now.loss, then.loss, rel_tol=tolerance)
        return losses and math.isclose(now.grad_norm, then.grad_norm, rel_tol=_FOR_NORMS * tolerance)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of it."""

    updates: list[RecordedUpdate] = field(kw_only=False)
    """Those that were made."""
    healed: bool
    """They went another way than they had."""
    exact: bool
    """Bit for bit as they had, wherever that could be compared."""
    quarantined: tuple[RecordedUpdate, ...] = ()
    """Those whose batches were found unusual and stay out."""


@final
class _Usual:
    """How large losses and gradients were before the first sign."""

    def __init__(self, missed: Sequence[RecordedUpdate], first_sign: int) -> None:
        before = [done.signals for done in missed if done.signals.step < first_sign] or [missed[0].signals]
        self._loss = max(signals.loss for signals in before)
        self._norm = max(signals.grad_norm for signals in before)

    def covers(self, seen: GradientView, done: RecordedUpdate) -> bool:
        """No worse than it went, or than others went before anything was wrong."""
        now, then = seen.signals, done.signals
        if not then.all_finite:
            return self.is_usual(seen)
        limit = max(then.loss + _NO_WORSE_LOSS * abs(then.loss), self._loss)
        return now.loss <= limit and now.grad_norm <= _NO_WORSE_NORM * max(then.grad_norm, self._norm)

    def is_usual(self, seen: GradientView) -> bool:
        """Beside those before anything was wrong; wide, because single batches differ."""
        now = seen.signals
        return now.loss <= self._loss + abs(self._loss) and now.grad_norm <= _WIDE * self._norm


def _as_of(then: Signals, now: Signals) -> Signals:
    """What was measured this time, at the step of then."""
    now = replace(now, inputs=None, batch=None, outputs=None, initial=None)
    return replace(now, step=then.step, lr=then.lr, metrics=then.metrics, probe=then.probe)


def _identical(now: Signals, then: Signals) -> bool:
    """All that both looks have measured: losses, and the norms of gradients, buffers and weights."""
    same = (now.losses, now.grad_norm, now.norms) == (then.losses, then.grad_norm, then.norms)
    weighed = bool(now.weight_norms and then.weight_norms)
    # why by name: a rollback writes constant buffers too, and then they are looked at for a while
    peaks = dict(zip(then.buffers, then.buffer_peaks, strict=True))
    same = same and all(peaks.get(n, p) == p for n, p in zip(now.buffers, now.buffer_peaks, strict=True))
    return same and (not weighed or now.weight_norms == then.weight_norms)


@final
@dataclass(slots=True)
class Rollouts:
    """Plays a policy, or runs backward, under current weights and those of earlier states; nothing stays changed."""

    recovery: Recovery
    buffers: Buffers
    device: torch.device
    alone: bool
    """One process: others would have to play along."""
    controls: Controls | None = None

    def answer(self, ask: Ask) -> list[list[float]] | None:
        """Play for `ask`, or keep a state for it."""
        if ask.what == "scores":
            return self.scores(ask.states, ask.count, ask.rollouts)
        self.recovery.pin(ask.states[0].step)
        return None

    def scores(self, states: Sequence[Any], seed: int, count: int) -> list[list[float]] | None:
        """What each earns in `count` rollouts, the current weights first; None where it cannot be told."""
        evaluate = None if self.controls is None else self.controls.evaluate
        if evaluate is None or not self.alone:
            return None
        try:
            played = [[self._play(evaluate, seed + i) for i in range(count)]]
            for state in states:
                with self.recovery.weights_of(state):
                    played.append([self._play(evaluate, seed + i) for i in range(count)])
        except Exception:  # the user's code, run at a time they did not expect: whatever it raises means "cannot be"
            return None
        return played if all(math.isfinite(score) for scores in played for score in scores) else None

    def gradient_factor(self, reruns: "BatchReruns", states: Sequence[Any], *, since: int) -> float | None:
        """What backward gives for the first batch after a state, under it, over what it gave: see `Ask`."""
        if not self.alone or reruns.precision.scales:
            return None
        for state in states or reversed(self.recovery.states):
            missed = self.recovery.missed(state.updates)
            if missed and len(missed[0].micro_batches) == 1:
                first, then = missed[0], missed[0].signals
                held = then.grad_norm / first.norm if first.norm and 0 < since <= then.step else 1.0
                now = self._norms(first.micro_batches[0].recipe, reruns, state, loss=then.loss)
                return None if now is None else common_factor(now, [norm / held for norm in then.norms])
        return None

    def _norms(self, recipe: Any, reruns: "BatchReruns", state: Any, *, loss: float) -> list[float] | None:
        """Of the gradients of a remembered batch; None where even its loss is another one."""
        parameters = reruns.trained.parameters
        grads = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            with self.buffers.untouched(), random_numbers_kept(self.device), self.recovery.weights_of(state):
                self.buffers.put_back()
                closure, batch = recipe.again()
                with reruns.precision.autocast():
                    found = closure() if batch is None else closure(batch)
                found.backward()
            fresh = [p.grad for p in parameters if p.grad is not None]
            values = [float(found.detach()), *map(float, measure(fresh, layout_of(fresh)))]  # sync: only in trouble
        except Exception:  # the user's code, run at a time they did not expect: whatever it raises means "cannot be"
            return None
        finally:
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad
        return values[1:] if math.isclose(values[0], loss, rel_tol=_REPEATS, abs_tol=1e-9) else None

    def _play(self, evaluate: Any, seed: int) -> float:
        with torch.no_grad(), self.buffers.untouched(), random_numbers_kept(self.device):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            return float(evaluate())
