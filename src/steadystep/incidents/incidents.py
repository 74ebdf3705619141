"""Keeps the last steps of a run and, when one of them is refused, writes down what is needed to run it again."""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.modules import unwrapped
from steadystep._utils.rng import RngState
from steadystep._utils.tensors import is_sharded
from steadystep._utils.text import plain_name, warn
from steadystep._utils.tree import mapped
from steadystep.incidents.bundle import HIDDEN, MEGABYTE, Draft, bundles_in, environment, folder_bytes, num_bytes
from steadystep.incidents.locate import as_before, second_look
from steadystep.incidents.origin import NaNTrace
from steadystep.optimizers import own_state
from steadystep.precision import Precision
from steadystep.records import Action, Outcome, Plan
from steadystep.snapshots.buffers import Buffers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedStep:
    """A refused step that was run again, and the bundle that is being written about it."""

    examination: NaNTrace
    """Result of the second run."""
    precision: str
    """Precision of the step: fp32, bf16 or fp16."""
    draft: Draft | None = None
    """The bundle; None if it could not be written."""
    rank: int = 0
    """Rank on which it began."""
    said: str | None = None
    """Description from that rank; None in a single process."""


_WITH_NORMS = 50  # newest steps that keep the norm of every tensor in the file; a large model has thousands


@final
class History:
    """Ring buffer of outcomes; nothing is copied or formatted until it is written.

    Args:
        length: number of outcomes to keep.
    """

    def __init__(self, length: int = 500) -> None:
        self._past: deque[Outcome] = deque(maxlen=length)

    def note(self, outcome: Outcome) -> None:
        """Add an outcome; the oldest is dropped."""
        self._past.append(outcome)

    def __len__(self) -> int:
        return len(self._past)

    @property
    def last(self) -> Outcome | None:
        """The newest outcome."""
        return self._past[-1] if self._past else None

    def lines(self) -> Iterator[str]:
        """Yield one line of JSON per outcome, oldest first; `Outcome.from_json` reads them."""
        old = len(self._past) - _WITH_NORMS
        for i, outcome in enumerate(self._past):
            signals = outcome.signals
            if i < old and signals is not None and signals.norms:
                outcome = replace(outcome, signals=replace(signals, names=(), norms=()))
            yield outcome.to_json()


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
        examination: NaNTrace | None = None,
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


def step_state(model: nn.Module, optimizer: Optimizer | None, rng: RngState | None) -> dict[str, Any]:
    """Alive, not copied: written at once or not at all. Buffers that are not persistent are there too."""
    model = unwrapped(model)
    return {
        "parameters": {plain_name(n): p.detach() for n, p in model.named_parameters() if not nn.parameter.is_lazy(p)},
        "buffers": {plain_name(n): b.detach() for n, b in model.named_buffers() if not nn.parameter.is_lazy(b)},
        "evaluating": [plain_name(n) for n, m in model.named_modules() if not m.training],
        "optimizer": None if optimizer is None else own_state(optimizer),
        "random": None if rng is None else rng.as_dict(),
    }


def gathered(state: Any, *, keep: bool) -> Any:
    """The same with whole tensors in place of parts, on the host; all ranks call it, and one of them keeps them.

    One tensor after another, so that an accelerator holds no more than one of them whole.
    """

    def whole(tensor: Tensor) -> Tensor | None:
        if not is_sharded([tensor]):
            return tensor
        together = cast("DTensor", tensor).full_tensor()
        return together.cpu() if keep else None  # sync: only in trouble

    return mapped(state, whole)
