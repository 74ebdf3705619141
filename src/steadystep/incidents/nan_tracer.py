"""A refused step is run again under hooks, only then, and what was seen is written down."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.optim import Optimizer

from steadystep.incidents.incidents import Incidents, RefusedStep, gathered, step_state
from steadystep.incidents.locate import as_before, second_look
from steadystep.incidents.origin import NaNTrace, Origin
from steadystep.parallel import Ranks, SingleProcess
from steadystep.precision import Precision
from steadystep.records import Outcome, Plan, Signals
from steadystep.signals.gradients import GradientView
from steadystep.snapshots.buffers import Buffers

if TYPE_CHECKING:
    from steadystep.engine.microbatches import MicroBatchRunner


@final
class NaNTracer:
    """Finds the source of a NaN in a guarded loop: `open` before an intervention, `close` afterwards.

    Without a folder nothing is written, and only steps with NaN or infinity are run again. Built by the guard.

    Args:
        model: the model.
        optimizer: its optimizer.
        precision: provides autocast and the loss scale.
        buffers: remembers buffers before the forward pass.
        runner: holds the micro-batches of the step.
        incidents: writes bundles; None for none.
        ranks: the ranks of a distributed run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        buffers: Buffers,
        runner: "MicroBatchRunner",
        incidents: Incidents | None,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._precision = precision
        self._buffers = buffers
        self._runner = runner
        self._incidents = incidents
        self.keeps_history = incidents is not None
        """Whether `note` has to be called at each step."""
        self._ranks = ranks or SingleProcess()

    def open(self, plan: Plan, view: GradientView, *, updates: int) -> RefusedStep | None:
        """Run the refused step again, while the weights are still those it started from."""
        if not plan.actions or not Incidents.concerns(plan):
            return None
        signals = view.signals
        if self._ranks.size > 1:
            return self._open_together(plan, signals, updates=updates)
        if self._incidents is not None and self._incidents.wants(plan, signals.step):
            return self._write(self._incidents, signals, updates=updates)
        return None if signals.all_finite else RefusedStep(examination=self._second_look(signals), precision="")

    def _open_together(self, plan: Plan, signals: Signals, *, updates: int) -> RefusedStep:
        """Every rank looks again, or the others would wait for it; the one where it began writes about it."""
        with self._ranks.no_sync():
            found = self._second_look(signals, together=True)
        rank, said = whose(self._ranks, signals, found, _said(found.origin, signals))
        writes = rank == self._ranks.rank and self._incidents is not None and self._incidents.wants(plan, signals.step)
        state = None
        if self._ranks.sharded and not self._ranks.all(not writes):
            state = self._gathered(signals, keep=writes)
        if writes and self._incidents is not None:
            case = self._write(self._incidents, signals, updates=updates, found=found, state=state)
            return replace(case, rank=rank, said=said)
        return RefusedStep(examination=found, precision="", rank=rank, said=said)

    def _gathered(self, signals: Signals, *, keep: bool) -> Mapping[str, Any]:
        """What the step started from, brought together from all ranks; on those that do not `keep` it, in part."""
        rng = self._runner.suspect(signals.bad_micro_batches)[2]
        with as_before(self._buffers):
            whole: Mapping[str, Any] = gathered(step_state(self._model, self._optimizer, rng), keep=keep)
            return whole

    def _second_look(self, signals: Signals, *, together: bool = False) -> NaNTrace:
        work, batch, rng = self._runner.suspect(signals.bad_micro_batches)
        ranks, stages = self._ranks, self._ranks.stages
        if together:
            work = ranks.together(work) if ranks.all(work is not None) and work is not None else None
        with as_before(self._buffers):
            return second_look(
                self._model,
                work,
                batch,
                rng=rng,
                precision=self._precision,
                scale=signals.scale,
                agree=ranks.all if together and stages is None else None,
                sharded=ranks.sharded,
                stages=stages,
            )

    def _write(
        self,
        incidents: Incidents,
        signals: Signals,
        *,
        updates: int,
        found: NaNTrace | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> RefusedStep:
        work, batch, rng = self._runner.suspect(signals.bad_micro_batches)
        return incidents.open(
            step=signals.step,
            updates=updates,
            model=self._model,
            optimizer=self._optimizer,
            work=work,
            batch=batch,
            rng=rng,
            precision=self._precision,
            scale=signals.scale,
            buffers=self._buffers,
            examination=found,
            gathered=state,
        )

    def close(self, outcome: Outcome, case: RefusedStep | None) -> Outcome:
        """Return the outcome with the origin and the bundle added."""
        if case is None:
            return outcome
        said = _said(case.examination.origin, outcome.signals) if case.said is None else case.said
        outcome = replace(outcome, origin=said)
        path = None if self._incidents is None else self._incidents.report(outcome, case)
        written = self._ranks.texts("" if path is None else str(path))[case.rank]
        return replace(outcome, incident=written) if written else outcome

    def note(self, outcome: Outcome) -> None:
        """Add one step to the history."""
        if self._incidents is not None:
            self._incidents.note(outcome)


def _said(origin: Origin, signals: Signals | None) -> str:
    if origin.phase != "none":
        return f"{origin.place}, {origin.phase}: {origin.what}"
    repeated = origin.what or "not reproduced when the step was re-run: suspect the hardware"
    finite = signals is not None and math.isfinite(signals.loss) and math.isfinite(signals.grad_norm)
    return "" if finite else repeated


_BAD, _FINE = "!", "."


def whose(ranks: Ranks, signals: Signals, found: NaNTrace, said: str) -> tuple[int, str]:
    """The rank, and what it has to say: one whose own loss was bad, else one where it showed again, else the first.

    All ranks call it, each with what it found.
    """
    every = ranks.texts(f"{_FINE if found.finite else _BAD}{said}")
    again = [rank for rank, text in enumerate(every) if text.startswith(_BAD)]
    both = [rank for rank in again if rank in signals.bad_ranks]
    if ranks.stages is not None:  # the loss is that of the last stage; values go bad on the way to it, gradients back
        both = [rank for rank in again if ", backward: " not in every[rank]] or again[-1:]
    rank = next(iter([*both, *signals.bad_ranks, *again]), 0)
    text = every[rank][1:]
    known = bool(again or signals.bad_ranks)
    return rank, f"rank {rank}: {text}" if known and text else text
