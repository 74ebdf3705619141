"""NOTICE, EXPLAIN, DECIDE, ACT: a finding, a diagnosis, a plan, an outcome."""

from dataclasses import dataclass, field
from typing import Annotated, SupportsFloat, final

from pydantic import PlainSerializer, PlainValidator

from steadystep._deprecated import old_arguments, old_fields
from steadystep.records.record import JSON, ActionName, Damage, Record, Severity
from steadystep.records.signals import Signals


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Record):
    """NOTICE: one detector's claim about one step."""

    __pydantic_config__ = JSON

    detector: str
    step: int
    severity: Severity
    value: float
    limit: float
    what: str = ""
    """One plain clause: "the loss is NaN"."""
    where: tuple[str, ...] = ()
    """Tensors, buffers or micro-batches concerned."""
    since: int | None = None
    """The step it began at, where that is known to be before `step`."""
    baseline: float | None = None
    """What the value was before, where there is such a thing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Record):
    """EXPLAIN: what probably caused the findings, and how far the damage reached."""

    __pydantic_config__ = JSON

    cause: str = "healthy"
    damage: Damage = Damage.NONE
    findings: tuple[Finding, ...] = ()
    evidence: str = ""
    advice: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Record):
    """DECIDE: what to do, as data. No actions means: go ahead."""

    __pydantic_config__ = JSON

    actions: tuple[ActionName, ...] = ()
    reason: str = ""
    norm: float | None = None
    """With "rescale": the gradient norm to come down to."""
    to: int | None = None
    """With "rollback" and "restore-moments": the step whose state is restored. A rollback without it goes to the newest
    finite checkpoint."""
    rank: int | None = None
    """With "copy-replica": the rank whose weights and moments all others take."""
    kept: tuple[str, ...] = ()
    """With "restore-kept": tensors of the kept objects that are restored."""
    lr: float | None = None
    """With "cut-lr" and "hold-lr": the ceiling for the learning rate from here on."""
    hold: int | None = None
    """With "cut-lr" and "hold-lr": healthy updates before it is lifted; the usual number without it."""
    until: int | None = None
    """With "replay": the step of the first sign. After a rollback, updates of remembered batches are replayed; from
    this step on only where they go better this time."""
    outside: bool = False
    """With "replay": the weights were modified outside the optimizer, so that all may be replayed."""
    only_whole: bool = False
    """With "replay": unless all of them can be replayed, none is."""

    @property
    def proceeds(self) -> bool:
        """True when the update is taken as it stands."""
        return not self.actions


# A micro-batch's loss may still be on its device; reading it is left to whoever asks.
_Reading = Annotated[SupportsFloat, PlainValidator(float), PlainSerializer(float, return_type=float)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Record):
    """ACT: what was done."""

    __pydantic_config__ = JSON

    step: int
    reading: _Reading
    """The loss, perhaps still on its device: use `.loss`."""
    stepped: bool
    """The weights were updated."""
    pending: bool = False
    """A micro-batch inside an open accumulation group: nothing was decided yet."""
    plan: Plan = field(default_factory=Plan)
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    signals: Signals | None = None
    """What the update was judged by; None while pending."""
    left_out: tuple[int, ...] = ()
    """Micro-batches the update was computed without."""
    clipped: bool = False
    lr_mult: float = 1.0
    """What the learning rate was multiplied by for this update: below 1 while a run recovers."""
    origin: str = ""
    """Where it began: the first module that made a NaN or an infinity when a refused step was run again."""
    incident: str = ""
    """The folder with everything that is needed to run this step again."""
    restored: int | None = None
    """After a rollback: the number of updates in the weights now."""
    replayed: int = 0
    """Of these, how many were replayed from remembered batches."""
    exact: bool = False
    """These came out bit for bit as they had, compared up to the first sign of trouble; False where it is not known."""

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
        """Return what was done about the step that these signals are of."""
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
        """The loss as seen, NaN included: of this micro-batch while pending, else the mean of those that counted."""
        return float(self.reading)  # sync: only inside an open group, and only when asked

    @property
    def lr(self) -> float:
        """Learning rate in use for this update: the one asked for times `lr_mult`; 0.0 while pending."""
        return 0.0 if self.signals is None else self.signals.lr * self.lr_mult

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the detectors claimed about this step."""
        return self.diagnosis.findings


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One step that was not like the others, as the guard saw it."""

    step: int
    cause: str
    severity: str
    """The highest of its findings: info, warn, act or critical."""
    evidence: str = ""
    advice: str = ""
    done: str = ""
    """What was done, as a sentence."""
    stepped: bool = True
    restored: int | None = None
    """After a rollback: the number of updates in the restored weights."""
    origin: str = ""
    """The first bad module, where the step was run again."""
    bundle: str = ""
    """The folder with everything needed to run the step again."""
    findings: tuple[tuple[str, str, str], ...] = ()
    """Detector, severity, message."""


old_fields(Finding)
old_arguments(Finding)
old_fields(Plan)
old_fields(Outcome)
