"""One run of a scorecard, with a guard that acts or one that only looks; how it ended; the row made of such runs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import steadystep  # why: by its public face, as any loop would; nothing of the guard is loaded before a run is made
from steadystep._utils.modules import evaluating
from steadystep._utils.numbers import or_null
from steadystep._utils.text import quiet_log
from steadystep.config import Config
from steadystep.errors import MisuseError, TrainingHalted, UnsupportedError
from steadystep.faults.fault import NO_FAULT, Fault
from steadystep.faults.kinds import Declaration
from steadystep.records import LOUD, Outcome

_UNSEEN = 8  # batches behind the last step, for a training that brings no score of its own


FaultResult = Literal["harmless", "saved", "limited", "lost", "harmed", "not applicable"]
"""harmless: it came through alone. saved: only with a guard. limited: not even then, but the guard kept more than half
of the damage away. lost: it did not. harmed: it would have done better without."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one run ended."""

    score: float
    finite: bool
    """All weights and buffers are."""
    stopped: str = ""
    """Why it ended before its last step."""
    did: Mapping[str, int] = field(default_factory=dict)
    """What the guard did, and at how many steps."""
    cause: str = ""
    """What the guard named first, from the fault on."""
    said: str = ""
    """Its evidence for that."""
    alarms_before: int = 0
    """Steps before the fault at which it raised its voice."""

    def as_well_as(self, clean: "End", tolerance: float) -> bool:
        """It reached its last step with finite weights and a score that is no worse, within the tolerance."""
        limit = clean.score + tolerance * abs(clean.score)
        return self.finite and not self.stopped and math.isfinite(self.score) and self.score <= limit

    def harm(self, clean: "End") -> float:
        """How much worse than without the fault."""
        return self.score - clean.score if self.finite and math.isfinite(self.score) else math.inf

    def ratio(self, clean: "End") -> float:
        """Its score over that of the run without a fault; NaN where there is none to speak of."""
        return self.score / clean.score if clean.score > 0 else math.nan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScorecardRow:
    """One fault: three runs for each seed."""

    spec: Mapping[str, Any]
    label: str
    tolerance: float
    clean: tuple[End, ...] = ()
    unguarded: tuple[End, ...] = ()
    guarded: tuple[End, ...] = ()
    why_not: str = ""
    """Why this training cannot have this fault."""

    @property
    def survived_unguarded(self) -> int:
        """Seeds at which the run came through without a guard."""
        return sum(a.as_well_as(b, self.tolerance) for a, b in zip(self.unguarded, self.clean, strict=True))

    @property
    def survived_guarded(self) -> int:
        """Seeds at which it came through with one."""
        return sum(a.as_well_as(b, self.tolerance) for a, b in zip(self.guarded, self.clean, strict=True))

    @property
    def verdict(self) -> FaultResult:
        """Over all seeds: "harmed" when the guard came through fewer of them than the run alone."""
        if self.why_not:
            return "not applicable"
        if self.survived_guarded < self.survived_unguarded:
            return "harmed"
        if self.survived_unguarded == len(self.clean):
            return "harmless"
        if self.survived_guarded == len(self.clean):
            return "saved"
        return "limited" if self._limited else "lost"

    @property
    def _limited(self) -> bool:
        guarded, alone = (
            [end.harm(clean) for end, clean in zip(ends, self.clean, strict=True)]
            for ends in (self.guarded, self.unguarded)
        )
        stopped = any(end.stopped for end in self.guarded)
        return not stopped and sum(guarded) < 0.5 * sum(alone)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is not finite is None."""
        runs = {"clean": self.clean, "unguarded": self.unguarded, "guarded": self.guarded}
        return {
            "fault": self.label,
            "spec": {key: or_null(value) for key, value in self.spec.items()},
            "verdict": self.verdict,
            "why_not": self.why_not,
            "survived_unguarded": self.survived_unguarded,
            "survived_guarded": self.survived_guarded,
            **{
                name: [_end_as_dict(end, clean) for end, clean in zip(ends, self.clean, strict=True)]
                for name, ends in runs.items()
            },
        }


def _end_as_dict(end: End, clean: End) -> dict[str, Any]:
    return {
        "score": or_null(end.score),
        "ratio": or_null(end.ratio(clean)),
        "finite": end.finite,
        "stopped": end.stopped,
        "did": dict(end.did),
        "cause": end.cause,
        "said": end.said,
        "alarms_before": end.alarms_before,
    }


def _nothing() -> None:
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, ready to go."""

    model: nn.Module
    optimizer: Optimizer
    batch: Callable[[int], Any]
    """The batch of a step, asked for in order."""
    loss: Callable[[Any], Tensor]
    score: Callable[[int], float]
    """After so many steps; lower is better."""
    after_step: Callable[[], Any] = _nothing


def adapted(thing: Any) -> Training:
    """What a factory returned, in one shape.

    It has `model`, `optimizer` and `loss(batch)`; `batches(step)`, `batches` as a loader that is gone through again and
    again, or `batch()` for the next one; and if it likes `score()` (or `held_out()`, or `validate()`) and
    `after_step()`. What `steadystep train` takes will do. Without a score of its own, it is the mean loss of the
    batches behind the last step.
    """
    lacking = [name for name in ("model", "optimizer", "loss") if getattr(thing, name, None) is None]
    batch: Any = getattr(thing, "batches", None)
    following: Any = getattr(thing, "batch", None)
    if not callable(batch):
        if batch is not None:
            following = partial(next, _again_and_again(batch))
        batch = (lambda _: following()) if callable(following) else None
    if lacking or batch is None:
        lacking += ["batches(step)"] if batch is None else []
        raise MisuseError(f"the factory returned a {type(thing).__name__} without {', '.join(lacking)}")

    scores = (getattr(thing, name, None) for name in ("score", "held_out", "validate"))
    own = next((score for score in scores if callable(score)), None)

    def score(steps: int) -> float:
        with evaluating(thing.model):
            if own is not None:
                return float(own())  # sync: once a run
            losses = [thing.loss(batch(steps + i)).detach().double().reshape(()) for i in range(_UNSEEN)]
            return float(torch.stack(losses).mean())  # sync: once a run

    return Training(
        model=thing.model,
        optimizer=thing.optimizer,
        batch=batch,
        loss=thing.loss,
        score=score,
        after_step=getattr(thing, "after_step", None) or _nothing,
    )


def _again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


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
            return f"non-finite weights from step {step}"
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
        self.did.update(outcome.plan.actions)
        if not outcome.plan.actions and not any(finding.severity in LOUD for finding in outcome.findings):
            return
        if step < self._first:
            self.before += 1
        elif not self.cause:
            self.cause, self.said = outcome.diagnosis.cause, outcome.diagnosis.evidence


def weights_finite(model: nn.Module) -> bool:
    """Whether no weight and no buffer is NaN or infinite."""
    values = [t.isfinite().all() for t in model.state_dict().values() if t.is_floating_point()]
    return all(bool(value) for value in values)  # sync: once a run, and when a loss is not finite
