"""One run: a task, an arm, and perhaps a fault."""

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.text import quiet_log
from steadystep.faults import NO_FAULT, Fault, parse
from steadystep.faults.scorecard_run import weights_finite
from steadystep.lab.bench.rival_rules import RULES, Sample
from steadystep.lab.tasks import TASKS, Task

BatchLoss = Callable[[Any], Tensor]
"""The loss of a batch, with the fault in it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One step as the trainer tells it."""

    loss: float
    did: tuple[str, ...] = ()
    """What was done beside or instead of the plain update; empty for most."""
    loud: str = ""
    """What it raised its voice about."""
    sample: Sample | None = None
    """What the rules are shown, where this trainer records it."""


class Stopped(Exception):  # noqa: N818  # why: an end that was meant, not an error
    """The trainer ends the run by design."""


class Trainer(Protocol):
    """One arm of the study, made from a task."""

    model: nn.Module
    optimizer: Optimizer
    """Faults get these two, so they are the ones that really train."""

    def step(self, work: BatchLoss, batch: Any) -> Tick:
        """Forward, backward and whatever follows. Raises `Stopped` to end the run by design."""
        ...

    @property
    def updates(self) -> int:
        """Updates contained in the weights."""
        ...

    def close(self) -> None:
        """After the last step."""
        ...


@final
class Diary:
    """First words and acts; and, where samples come, what each rule would have said."""

    def __init__(self, first: int, *, num_steps: int, adam: bool) -> None:
        self._first = first
        self._rules = {name: info.make(num_steps) for name, info in RULES.items() if adam or not info.only_adam}
        self._steps = 0
        self._did: Counter[str] = Counter()
        self._row: dict[str, Any] = {"noticed": None, "said": "", "acted": None, "loud_before": 0, "acts_before": 0}
        self._alarms: dict[str, int] = {}
        self._before: Counter[str] = Counter()

    def note(self, tick: Tick) -> None:
        """One more step."""
        step, self._steps = self._steps, self._steps + 1
        self._did.update(tick.did)
        if step < self._first:
            self._row["loud_before"] += bool(tick.loud)
            self._row["acts_before"] += bool(tick.did)
        else:
            if self._row["noticed"] is None and (tick.loud or tick.did):
                self._row |= {"noticed": step, "said": tick.loud or ", ".join(tick.did)}
            if self._row["acted"] is None and tick.did:
                self._row["acted"] = step
        if tick.sample is not None:
            for name, rule in self._rules.items():
                if rule.update(tick.sample).alarm:
                    if step < self._first:
                        self._before[name] += 1
                    else:
                        self._alarms.setdefault(name, step)

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return self._row | {
            "did": dict(self._did),
            "steps": self._steps,
            "alarms": self._alarms,
            "alarms_before": dict(self._before),
        }


ALL = ("gpt", "clusters", "regression", "rnn")
NATS = ("gpt", "clusters", "rnn")
"""Their loss is a cross-entropy."""
REAL_INPUTS = ("clusters", "regression")
"""Their batches are real numbers and have targets of their own."""

NUM_STEPS, NUM_SLOW_STEPS = 480, 640

_OF_DATA = ("bad-input", "data-scale", "data-constant", "shuffled-labels", "stale-batch", "bad-loss")
_OF_GRADIENTS = ("grad-scale", "grad-sign-flip", "bad-gradient", "missing-zero-grad", "fp16-overflow", "fp16-underflow")
_OF_ONE_STEP = (*_OF_DATA, *_OF_GRADIENTS)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTrial:
    """One way to break a run."""

    name: str
    spec: Mapping[str, Any]
    """For `faults.parse`, without `at`."""
    tasks: tuple[str, ...] = ALL
    slow: bool = False
    """It creeps: what counts is how long before the damage it is noticed."""
    precision: Literal["fp32", "fp16"] = "fp32"
    num_steps: int = NUM_STEPS

    @property
    def destroyed(self) -> int:
        """Steps whose batch or gradient it spoils: what the oracle goes without, `benchmarks/oracle.py`.

        None where it spoils weights, moments or the learning rate; and none where it lasts to the end, because
        everything that follows would be left out.
        """
        lasts = self.spec.get("for", 1)
        return int(lasts) if self.spec["kind"] in _OF_ONE_STEP and lasts != "ever" else 0


def first_step(seed: int) -> int:
    """When it begins: 200 to 290, by the seed."""
    return 200 + 10 * (seed % 10)


_TRIALS = (
    FaultTrial(name="gradients x10", spec={"kind": "grad-scale", "factor": 10}),
    FaultTrial(name="gradients x1e4", spec={"kind": "grad-scale", "factor": 1e4}),
    FaultTrial(name="gradients x10 for good", spec={"kind": "grad-scale", "factor": 10, "for": "ever"}),
    FaultTrial(name="sign flipped for 20", spec={"kind": "grad-sign-flip", "for": 20}),
    FaultTrial(name="NaN in a gradient", spec={"kind": "bad-gradient"}),
    FaultTrial(name="Inf in a gradient", spec={"kind": "bad-gradient", "value": "inf"}),
    FaultTrial(name="no zero_grad for 20", spec={"kind": "missing-zero-grad", "for": 20}),
    FaultTrial(
        name="fp16 overflow for 3", spec={"kind": "fp16-overflow", "for": 3}, tasks=REAL_INPUTS, precision="fp16"
    ),
    FaultTrial(
        name="fp16 underflow for 20", spec={"kind": "fp16-underflow", "for": 20}, tasks=REAL_INPUTS, precision="fp16"
    ),
    FaultTrial(name="NaN in a weight", spec={"kind": "bad-weight"}),
    FaultTrial(name="flipped bit", spec={"kind": "bit-flip"}),
    FaultTrial(name="frozen layer", spec={"kind": "frozen-layer", "for": "ever"}),
    FaultTrial(name="zeroed layer", spec={"kind": "zeroed-layer"}),
    FaultTrial(name="dead ReLUs", spec={"kind": "dead-relus"}, tasks=("clusters",)),
    FaultTrial(name="moments lost", spec={"kind": "moments-scale", "factor": 0}),
    FaultTrial(name="moments x1000", spec={"kind": "moments-scale", "factor": 1000}),
    FaultTrial(name="LR x100 for 20", spec={"kind": "lr-scale", "factor": 100, "for": 20}),
    FaultTrial(name="LR x30 for good", spec={"kind": "lr-scale", "factor": 30, "for": "ever"}),
    FaultTrial(name="LR +1 % a step", spec={"kind": "lr-creep", "growth": 1.01}, slow=True, num_steps=NUM_SLOW_STEPS),
    FaultTrial(name="LR +5 % a step", spec={"kind": "lr-creep", "growth": 1.05}),
    FaultTrial(name="NaN loss, five", spec={"kind": "bad-loss", "for": 5}),
    FaultTrial(
        name="loss drifts",
        spec={"kind": "loss-drift", "per_step": 0.002},
        tasks=NATS,
        slow=True,
        num_steps=NUM_SLOW_STEPS,
    ),
    FaultTrial(name="NaN in the input", spec={"kind": "bad-input"}, tasks=REAL_INPUTS),
    FaultTrial(name="inputs x1e6", spec={"kind": "data-scale", "factor": 1e6}, tasks=REAL_INPUTS),
    FaultTrial(name="targets x1e6", spec={"kind": "data-scale", "factor": 1e6, "part": 1}, tasks=("regression",)),
    FaultTrial(name="constant input for 20", spec={"kind": "data-constant", "for": 20}),
    FaultTrial(name="labels shuffled for 20", spec={"kind": "shuffled-labels", "for": 20}, tasks=REAL_INPUTS),
    FaultTrial(name="same batch for 20", spec={"kind": "stale-batch", "for": 20}),
)

TRIALS: dict[str, FaultTrial] = {trial.name: trial for trial in _TRIALS}
"""By the name shown in tables."""


SCORED, EVERY = 5, 10
"""The score is the mean held-out loss at the last five tens of steps: less noise than the last one alone."""
_GRACE = 8
"""Steps that a run with NaN weights still gets, for rules that need several."""


def run(
    make: Callable[[Task], Trainer],
    *,
    task: str,
    seed: int,
    num_steps: int,
    trial: str = "",
    without: Container[int] = (),
    curve: bool = False,
) -> dict[str, Any]:
    """The row of one run. `make` may change the task's optimizer; batches `without` are drawn and not used."""
    made = TASKS[task].make(seed)
    trainer = make(made)
    user_lr = float(made.optimizer.param_groups[0]["lr"])
    start = first_step(seed)
    fault = NO_FAULT
    if trial:
        spec = {"at": start, **TRIALS[trial].spec}
        fault = parse(spec, model=trainer.model, optimizer=trainer.optimizer, seed=seed)
    diary = Diary(start if trial else num_steps, num_steps=num_steps, adam="betas" in made.optimizer.defaults)
    held_out = _HeldOut(made, fault, num_steps=num_steps, drawn_from=start - EVERY if curve else None)
    rates = [user_lr]
    hook = trainer.optimizer.register_step_pre_hook(lambda o, *_: rates.append(float(o.param_groups[0]["lr"])))
    with quiet_log():
        try:
            stopped = _train(made, trainer, fault, diary, num_steps=num_steps, without=without, look=held_out.look)
        finally:
            hook.remove()
            trainer.close()
    finite = weights_finite(made.model)
    last = list(held_out.seen.values())[-SCORED:]
    whole = finite and not stopped and len(last) == SCORED
    return diary.as_row() | {
        "start": start,
        "score": sum(last) / SCORED if whole else math.nan,
        "finite": finite,
        "stopped": stopped,
        "lost": num_steps - trainer.updates,
        "lr": rates[-1] / user_lr,
        "curve": held_out.drawn,
    }


@final
class _HeldOut:
    """The held-out loss at the last tens of steps, and from `drawn_from` on where a curve is wanted."""

    def __init__(self, task: Task, fault: Fault, *, num_steps: int, drawn_from: int | None) -> None:
        self._task, self._fault, self._last, self._from = task, fault, num_steps - 1, drawn_from
        self.seen: dict[int, float] = {}
        self.drawn: dict[str, float] = {}

    def look(self, step: int) -> None:
        left = self._last - step
        if left % EVERY == 0 and (left < SCORED * EVERY or (self._from is not None and step >= self._from)):
            self.seen[step] = self._task.held_out()
            if self._from is not None:  # as the loss reads, where the fault is in the reading
                read = self._fault.loss(step, torch.tensor(self.seen[step], dtype=torch.float64))
                self.drawn[str(step)] = float(read)  # sync: cadence


def _train(
    task: Task,
    trainer: Trainer,
    fault: Fault,
    diary: Diary,
    *,
    num_steps: int,
    without: Container[int],
    look: Callable[[int], None],
) -> str:
    """Why it ended before its last step, if it did."""
    left = _GRACE
    for step in range(num_steps):
        batch = fault.batch(step, task.batch())
        if step in without:
            continue
        try:
            with fault.at(step):
                tick = trainer.step(_work(task, fault, step), batch)
        except Stopped as end:
            return str(end)
        except Exception as error:  # whatever an arm does with a broken run is its result
            return f"crashed: {type(error).__name__}: {error}"[:200]
        task.after_step()
        diary.note(tick)
        look(step)
        if not math.isfinite(tick.loss) and not weights_finite(task.model):
            left -= 1
            if not left:
                return ""  # why: NaN weights do not heal, so there is nothing more to see
    return ""


def _work(task: Task, fault: Fault, step: int) -> Callable[[Any], Tensor]:
    return lambda batch: fault.loss(step, task.loss(batch))
