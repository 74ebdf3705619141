"""One run of a scorecard, with a guard that acts or one that only looks."""

from collections import Counter
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

import steadystep  # why: by its public face, as any loop would; nothing of the guard is loaded before a run is made
from steadystep.config import Config
from steadystep.errors import MisuseError, TrainingHalted, UnsupportedError
from steadystep.faults.card.row import End
from steadystep.faults.card.training import Training, adapted
from steadystep.faults.declaration import Declaration
from steadystep.faults.fault import NO_FAULT, Fault
from steadystep.notices import quiet_log
from steadystep.records import Outcome

_LOUD = ("warn", "act", "critical")


def run(
    factory: Callable[[int], Any],
    seed: int,
    *,
    steps: int,
    config: Config,
    declaration: Declaration | None = None,
) -> End:
    """Train for `steps` steps with the fault, and see what is left. Random numbers of the process stay as they were.

    A fault that cannot be put in raises `MisuseError` or `UnsupportedError`.
    """
    with torch.random.fork_rng(devices=[]), quiet_log():
        torch.manual_seed(seed)
        training = adapted(factory(seed))
        fault = NO_FAULT
        if declaration is not None:
            fault = declaration.made(training.model, training.optimizer, seed=seed)
        diary = _Diary(0 if declaration is None else declaration.when.first)
        with steadystep.Guard(training.model, training.optimizer, config=config) as guard:
            stopped = _train(training, guard, fault, steps=steps, diary=diary, tolerant=declaration is not None)
        return End(
            score=training.score(steps),
            finite=weights_finite(training.model),
            stopped=stopped,
            did=dict(diary.did),
            cause=diary.cause,
            said=diary.said,
            alarms_before=diary.before,
        )


def _train(
    training: Training, guard: "steadystep.Guard", fault: Fault, *, steps: int, diary: "_Diary", tolerant: bool
) -> str:
    for step in range(steps):
        batch = fault.batch(step, training.batch(step))

        def closure(batch: Any, step: int = step) -> Tensor:
            return fault.loss(step, training.loss(batch))

        try:
            with fault.at(step):
                outcome = guard.step(closure, batch=batch)
            training.after_step()
        except TrainingHalted as halt:
            return f"halted at step {halt.step}: {halt.what}"
        except (MisuseError, UnsupportedError):
            raise
        except Exception as error:  # the user's own code, in a run that was broken on purpose
            if not tolerant:
                raise
            return f"{type(error).__name__} at step {step}"
        diary.note(step, outcome)
        # why: NaN weights do not heal, so there is nothing more to see
        if outcome.stepped and outcome.loss - outcome.loss != 0.0 and not weights_finite(training.model):
            return f"the weights are not finite since step {step}"
    return ""


@final
class _Diary:
    """What a guard did and said."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.did: Counter[str] = Counter()
        self.cause = self.said = ""
        self.before = 0

    def note(self, step: int, outcome: Outcome) -> None:
        self.did.update(outcome.plan.steps)
        if not outcome.plan.steps and not any(finding.severity in _LOUD for finding in outcome.findings):
            return
        if step < self._first:
            self.before += 1
        elif not self.cause:
            self.cause, self.said = outcome.diagnosis.cause, outcome.diagnosis.evidence


def weights_finite(model: nn.Module) -> bool:
    """Whether no weight and no buffer is NaN or infinite."""
    values = [t.isfinite().all() for t in model.state_dict().values() if t.is_floating_point()]
    return all(bool(value) for value in values)  # sync: once a run, and when a loss is not finite
