"""Keeps the last steps of a run and, when one of them is refused, writes down what is needed to run it again."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.optim import Optimizer

from steadystep._utils.rng import RngState
from steadystep._utils.text import warn
from steadystep.incidents.bundle import HIDDEN, MEGABYTE, Draft, bundles_in, environment, folder_bytes, num_bytes
from steadystep.incidents.origin import Examination
from steadystep.incidents.refused_step import History, RefusedStep, as_before, second_look, step_state
from steadystep.precision import Precision
from steadystep.records import Action, Outcome, Plan
from steadystep.snapshots.buffers import Buffers

if TYPE_CHECKING:
    from steadystep.engine.closures import Closure

_WORDS = {
    Action.STOP: "halt",
    Action.ROLLBACK: Action.ROLLBACK,
    Action.LEAVE_OUT: Action.LEAVE_OUT,
    Action.SKIP_STEP: "skip",
}
_GRAVE = frozenset((Action.STOP, Action.ROLLBACK))
_APART_STEPS = 200


@final
class Incidents:
    """Writes incident bundles: `note` each step, `open` before and `report` after an intervention.

    A bundle that cannot be written is reported once, and training continues.

    Args:
        folder: folder of all bundles.
        config: settings to store in each bundle.
        history: number of past steps to store in each bundle.
        max_bundles: the most bundles of one run.
        max_bytes: the most bytes of all bundles.
        max_batch_bytes: a larger batch is left out.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any] | None = None,
        history: int = 500,
        max_bundles: int = 20,
        max_bytes: float = 4_000 * MEGABYTE,
        max_batch_bytes: float = 64 * MEGABYTE,
    ) -> None:
        self.folder = folder
        self.history = History(history)
        self.note: Callable[[Outcome], None] = self.history.note
        """Add the outcome of one step to the history: `note(outcome)`."""
        self._config = dict(config or {})
        self._max_bundles, self._max_bytes, self._max_batch_bytes = max_bundles, max_bytes, max_batch_bytes
        self._complained = False
        self._last_step: int | None = None
        for leftover in folder.glob(f"{HIDDEN}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    @staticmethod
    def concerns(plan: Plan) -> bool:
        """Return whether a `plan` is an incident: a refused step, a restored state, a stop. Not an fp16 overflow."""
        return not _WORDS.keys().isdisjoint(plan.actions)

    def wants(self, plan: Plan, step: int) -> bool:
        """Return whether to write a bundle: the first ones all, then one of a row of skipped steps every so often."""
        grave = not _GRAVE.isdisjoint(plan.actions)
        often = self._last_step is not None and step - self._last_step < _APART_STEPS
        if often and not grave and len(bundles_in(self.folder)) >= self._max_bundles // 2:
            return False
        self._last_step = step
        return True

    def open(
        self,
        *,
        step: int,
        updates: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        work: "Closure | None" = None,
        batch: Any = None,
        rng: RngState | None = None,
        precision: Precision | None = None,
        scale: float = 1.0,
        buffers: Buffers | None = None,
        examination: Examination | None = None,
        gathered: Mapping[str, Any] | None = None,
    ) -> RefusedStep:
        """Run the step again under hooks and write its state, while the weights are still those it started from.

        Args:
            step: the attempt.
            updates: number of updates in the weights.
            model: as it was before the update; nothing of it is changed.
            optimizer: the optimizer whose state belongs to the weights.
            work: the closure; None if the loop gave a loss, which cannot be run again.
            batch: argument of the closure, if it has one.
            rng: torch's random state when the step began.
            precision: provides autocast.
            scale: loss scale of this step.
            buffers: remembers their values before the forward pass.
            examination: result of an earlier run of the step.
            gathered: the state, where this process holds only a part of it.
        """
        with as_before(buffers):
            if examination is None:
                examination = second_look(model, work, batch, rng=rng, precision=precision, scale=scale)
            draft = None
            with self._harmless():
                state = step_state(model, optimizer, rng) if gathered is None else gathered
                draft = self._draft(state, batch, step=step, updates=updates)
        setting = "fp32" if precision is None or not precision.casts else precision.setting
        return RefusedStep(examination=examination, precision=setting, draft=draft)

    def report(self, outcome: Outcome, case: RefusedStep) -> Path | None:
        """Complete the bundle with what was done; return its folder, or None if it could not be written."""
        if case.draft is None:
            return None
        path = None
        if self.history.last is not outcome:
            self.note(outcome)
        with self._harmless(), _whole_or_not_at_all(case.draft):
            path = case.draft.finish(name_of(outcome), self._record(outcome, case), self.history.lines())
            self._complained = False
        return path

    def _draft(self, state: Mapping[str, Any], batch: Any, *, step: int, updates: int) -> Draft:
        room = self._make_room(num_bytes(state))
        draft = Draft(self.folder, step=step, updates=updates)
        with _whole_or_not_at_all(draft):
            draft.put_state(state, max_bytes=room)
            if batch is not None:
                draft.put_batch(batch, max_bytes=min(room, self._max_batch_bytes))
        return draft

    def _record(self, outcome: Outcome, case: RefusedStep) -> dict[str, Any]:
        diagnosis, again = outcome.diagnosis, json.loads(case.examination.to_json())
        restored = f", the weights contain {outcome.restored} updates" if outcome.restored is not None else ""
        return {
            "what": diagnosis.evidence or outcome.plan.reason,
            "why": diagnosis.cause,
            "did": ", ".join(outcome.plan.actions) + restored,
            "advice": diagnosis.advice,
            "origin": again.pop("origin"),
            "rerun": again,
            "precision": case.precision,
            "outcome": json.loads(outcome.to_json()),
            "environment": environment(),
            "config": self._config,
        }

    def _make_room(self, coming: int) -> float:
        """Remove bundles between the first and the newest ones; returns how many bytes a new one may take."""
        kept = [(path, folder_bytes(path)) for path in bundles_in(self.folder)]
        first = self._max_bundles // 2
        while len(kept) > first and (
            len(kept) >= self._max_bundles or sum(size for _, size in kept) + coming > self._max_bytes
        ):
            shutil.rmtree(kept.pop(first)[0])
        return self._max_bytes - sum(size for _, size in kept)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._complained:
                self._complained = True
                said = f"{type(error).__name__}: {error}"
                warn(f"an incident could not be written to {self.folder} ({said}); training continues")


def name_of(outcome: Outcome) -> str:
    """The bundle's folder: step and what was done."""
    word = next((word for step, word in _WORDS.items() if step in outcome.plan.actions), "step")
    return f"incident-{outcome.step:06d}-{word}"


@contextmanager
def _whole_or_not_at_all(draft: Draft) -> Iterator[None]:
    try:
        yield
    except BaseException:
        draft.drop()
        raise
