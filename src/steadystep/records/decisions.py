"""NOTICE, EXPLAIN, DECIDE, ACT: a finding, a diagnosis, a plan, an outcome."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, SupportsFloat, final

from pydantic import PlainSerializer, PlainValidator

from steadystep._deprecated import old_arguments, old_fields
from steadystep._utils.text import html_card
from steadystep.records.record import GRAVE, JSON, ActionName, Damage, Quarantined, Record, Severity
from steadystep.records.signals import Signals


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Record):
    """NOTICE: what one detector found at one step."""

    __pydantic_config__ = JSON
    detector: str
    """Name of the detector."""
    step: int
    """The step it was found at."""
    severity: Severity
    """`info`: evidence for a diagnosis. `warn`: report it. `act`: an intervention is needed. `critical`: the update
    must not be applied."""
    value: float
    """The measured value."""
    limit: float
    """The limit that it crossed."""
    what: str = ""
    """One plain clause: "the loss is NaN"."""
    where: tuple[str, ...] = ()
    """Tensors, buffers or micro-batches concerned."""
    since: int | None = None
    """First step of the fault, where it is known to be earlier than `step`."""
    baseline: float | None = None
    """The usual value in this run, where there is one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Record):
    """EXPLAIN: the probable cause of the findings, and how far the damage reached."""

    __pydantic_config__ = JSON
    cause: str = "healthy"
    """Value of a `steadystep.diagnosis.Cause`; "healthy" if nothing is wrong."""
    fault: str = ""
    """Value of a `steadystep.diagnosis.Fault`: the particular mistake, where it could be told."""
    damage: Damage = Damage.NONE
    """How far the fault has reached."""
    findings: tuple[Finding, ...] = ()
    """The findings that were explained."""
    evidence: str = ""
    """What was measured, as a sentence."""
    advice: str = ""
    """What to change in the training script or the settings."""

    def __repr__(self) -> str:
        fault = f" ({self.fault})" if self.fault else ""
        return f"Diagnosis({self.cause}{fault}{': ' * bool(self.evidence)}{self.evidence})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        rows = (("fault", self.fault), ("evidence", self.evidence), ("try", self.advice))
        return html_card(self.cause, rows, tone="good" if self.cause == "healthy" else "bad")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Record):
    """DECIDE: what to do, as data. An empty plan applies the update as it is."""

    __pydantic_config__ = JSON
    actions: tuple[ActionName, ...] = ()
    """Names of the actions, in order; see `Action`."""
    reason: str = ""
    """Why, as a sentence for the log."""
    norm: float | None = None
    """With "rescale": the gradient norm to scale down to."""
    to: int | None = None
    """With "rollback" and "restore-moments": the step whose state is restored; without it, the newest checkpoint."""
    rank: int | None = None
    """With "copy-replica": the rank whose weights and moments all others copy."""
    kept: tuple[str, ...] = ()
    """With "restore-kept": names of the tensors to restore."""
    lr: float | None = None
    """With "cut-lr" and "hold-lr": upper limit of the learning rate from here on."""
    hold: int | None = None
    """With "cut-lr" and "hold-lr": healthy updates before the limit is lifted; None for the default."""
    until: int | None = None
    """With "replay": the first sign of the fault. Later updates are replayed only where they go better this time."""
    outside: bool = False
    """With "replay": the weights were modified outside the optimizer, so all updates may be replayed."""
    only_whole: bool = False
    """With "replay": replay all updates or none."""
    or_nothing: bool = False
    """With "replay": where not all updates can be replayed, nothing is changed."""
    raises: str = ""
    """With "raise-coefficient": its name in `steadystep.rl.Controls`."""

    @property
    def proceeds(self) -> bool:
        """Whether the update is applied unchanged."""
        return not self.actions


# A micro-batch's loss may still be on its device; reading it is left to whoever asks.
_Reading = Annotated[SupportsFloat, PlainValidator(float), PlainSerializer(float, return_type=float)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Record):
    """ACT: what was done with one step."""

    __pydantic_config__ = JSON
    step: int
    """The optimizer step, counted from 0; refused steps count."""
    reading: _Reading
    """The loss, perhaps still on its device. Read `loss` instead."""
    stepped: bool
    """Whether the weights were updated."""
    pending: bool = False
    """True for a micro-batch inside an open accumulation group: nothing was decided yet."""
    plan: Plan = field(default_factory=Plan)
    """The actions that were decided on."""
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    """The probable cause."""
    signals: Signals | None = None
    """The measurements that the update was judged by; None while pending."""
    left_out: tuple[int, ...] = ()
    """Positions of micro-batches that the update was computed without."""
    clipped: bool = False
    """Whether the gradients were clipped."""
    lr_mult: float = 1.0
    """Factor applied to the learning rate of this update: below 1 while a run recovers."""
    origin: str = ""
    """The first module that produced a NaN or an infinity when a refused step was run again."""
    incident: str = ""
    """Folder of the incident bundle, for `steadystep replay`."""
    restored: int | None = None
    """After a rollback: the number of updates in the weights now."""
    replayed: int = 0
    """How many of these were replayed from remembered batches."""
    exact: bool = False
    """Whether replayed updates were bit-identical up to the first sign of the fault; False where it is not known."""
    quarantined: tuple[Quarantined, ...] = ()
    """Batches that are not in the weights, as far as this step decided about them."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        signals: Signals,
        diagnosis: Diagnosis,
        *,
        stepped: bool,
        left_out: tuple[int, ...] = (),
        clipped: bool = False,
        lr_mult: float = 1.0,
        restored: int | None = None,
    ) -> "Outcome":
        """Return the outcome of the step that these signals were measured at.

        Args:
            plan: the actions that were decided on.
            signals: the measurements.
            diagnosis: the probable cause.
            stepped: whether the weights were updated.
            left_out: positions of micro-batches that were left out.
            clipped: whether the gradients were clipped.
            lr_mult: factor applied to the learning rate.
            restored: after a rollback, the number of updates in the weights.
        """
        return cls(
            step=signals.step,
            reading=signals.loss,
            stepped=stepped,
            plan=plan,
            diagnosis=diagnosis,
            signals=signals,
            left_out=left_out,
            clipped=clipped,
            lr_mult=lr_mult,
            restored=restored,
        )

    @property
    def loss(self) -> float:
        """The loss as measured, NaN included: of this micro-batch while pending, else the mean of all that counted."""
        return float(self.reading)  # sync: only inside an open group, and only when asked

    @property
    def lr(self) -> float:
        """Learning rate of this update, `lr_mult` included; 0.0 while pending."""
        return 0.0 if self.signals is None else self.signals.lr * self.lr_mult

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all detectors at this step."""
        return self.diagnosis.findings

    def __repr__(self) -> str:
        if self.pending:
            return f"Outcome(step {self.step}: pending)"
        done = "applied" if self.stepped else "not applied"
        actions = f", {'+'.join(self.plan.actions)} [{self.diagnosis.cause}]" if self.plan.actions else ""
        return f"Outcome(step {self.step}: loss {self.loss:.6g}, {done}{actions})"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        if self.pending:
            return html_card(f"step {self.step}", [("", "micro-batch of an open group")])
        found = self.diagnosis.cause if self.diagnosis.findings else ""
        update = "applied" if self.stepped else "not applied"
        rows = [("loss", f"{self.loss:.6g}"), ("update", update), ("cause", found)]
        rows += [("evidence", self.diagnosis.evidence), ("actions", ", ".join(self.plan.actions))]
        rows += [("origin", self.origin), ("bundle", self.incident), ("try", self.diagnosis.advice)]
        return html_card(f"step {self.step}", rows, tone="bad" if found else "good")


_NEAR, _NEXT = 12, 3  # steps between incidents that belong together: of one cause; of two, both of them grave


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One step at which the guard found a fault, as the run log holds it."""

    step: int
    """The optimizer step."""
    cause: str
    """Value of a `steadystep.diagnosis.Cause`."""
    severity: str
    """The highest severity of its findings: info, warn, act or critical."""
    evidence: str = ""
    """What was measured, as a sentence."""
    advice: str = ""
    """What to change."""
    done: str = ""
    """What the guard did, as a sentence."""
    stepped: bool = True
    """Whether the update was applied."""
    restored: int | None = None
    """After a rollback: the number of updates in the restored weights."""
    origin: str = ""
    """The first module that produced a non-finite value, where the step was run again."""
    bundle: str = ""
    """Folder of the incident bundle, for `steadystep replay`."""
    findings: tuple[tuple[str, str, str], ...] = ()
    """Detector, severity and message of each finding."""
    refused_lr: float | None = None
    """A learning rate that the guard did not use."""
    scaled_to: float | None = None
    """Norm that the gradient was scaled down to."""
    replayed: int = 0
    """After a rollback: how many updates were replayed."""
    quarantined: tuple[Quarantined, ...] = ()
    """Batches that are not in the weights."""
    seconds: float | None = None
    """Time since the step before, where it was logged."""
    ranks: tuple[int, ...] = ()
    """In a distributed run: the ranks it was found on, where they are known."""

    @property
    def is_routine(self) -> bool:
        """Whether it is part of normal operation, such as a step that a loss scaler skips."""
        return self.severity == "info"

    @property
    def calls_for_action(self) -> bool:
        """Whether it called for more than a report: the guard intervened, except in observe mode."""
        return self.severity in GRAVE or (not self.stepped and not self.is_routine)

    def continues(self, last: "Incident") -> bool:
        """Whether it belongs to the same episode as `last`, the incident before it."""
        apart = self.step - last.step
        both_grave = self.severity in GRAVE and last.severity in GRAVE
        return apart <= _NEAR if self.cause == last.cause else apart <= _NEXT and both_grave


def episodes(incidents: Sequence[Incident]) -> Iterator[tuple[Incident, ...]]:
    """Incidents close to each other as one."""
    episode: list[Incident] = []
    for incident in incidents:
        if episode and not incident.continues(episode[-1]):
            yield tuple(episode)
            episode = []
        episode.append(incident)
    if episode:
        yield tuple(episode)


old_fields(Finding)
old_arguments(Finding)
old_fields(Plan)
old_fields(Outcome)
