"""One guarded run as a few lines of text: what was found, decided and done, and how it ended. No sentences."""

import hashlib
import platform
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from steadystep import Guard, Outcome, TrainingHalted
from tests.field.plan import Run
from tests.field.program import End, Notes, Program, Seat, ended
from tests.field.row import guarded_end, silence
from tests.golden.choice import INSPECT

FROZEN_NAMES = {"replay": "catch-up"}  # what an action was called when the traces were recorded


@dataclass(frozen=True, slots=True)
class Decision:
    """One outcome in the words of the traces, whatever its attributes are called today."""

    step: int
    found: tuple[str, ...]
    cause: str
    damage: str
    actions: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]
    """Whole numbers that say how far an action goes."""
    stepped: bool
    clipped: bool
    lr_mult: float
    measured: tuple[float, ...]
    """Floating-point numbers that were decided by; they depend on the machine."""


def decision_of(outcome: Outcome) -> Decision:
    """The only place that knows the attributes of an outcome, a plan and a diagnosis."""
    plan, diagnosis, signals = outcome.plan, outcome.diagnosis, outcome.signals
    numbers = {
        "to": plan.to,
        "rank": plan.rank,
        "hold": plan.hold,
        "until": plan.until,
        "outside": plan.outside or None,
        "only-whole": plan.only_whole or None,
        "kept": len(plan.kept) or None,
        "left-out": len(outcome.left_out) or None,
        "restored": outcome.restored,
        "replayed": outcome.replayed or None,
        "exact": outcome.exact or None,
    }
    measured = () if signals is None else (signals.loss, signals.grad_norm, signals.lr)
    return Decision(
        step=outcome.step,
        found=tuple(f"{finding.detector} {finding.severity}" for finding in outcome.findings),
        cause=diagnosis.cause,
        damage=str(diagnosis.damage),
        actions=tuple(FROZEN_NAMES.get(action, str(action)) for action in plan.actions),
        numbers=tuple((name, int(value)) for name, value in numbers.items() if value is not None),
        stepped=outcome.stepped,
        clipped=outcome.clipped,
        lr_mult=outcome.lr_mult,
        measured=(*measured, *(value for value in (plan.norm, plan.lr) if value is not None)),
    )


@dataclass
class Tracing(Notes):
    """Notes that also write a line for each step at which something happened."""

    lines: list[str] = field(default_factory=list)
    num_stepped: int = 0
    num_clipped: int = 0
    _lr_mults: dict[int, float] = field(default_factory=dict)
    _measured: Any = field(default_factory=hashlib.sha256)

    def add(self, outcome: Outcome | None, who: int = 0) -> None:
        before = self.steps
        super().add(outcome, who)
        if outcome is None or self.steps == before:
            return
        decision = decision_of(outcome)
        self.num_stepped += decision.stepped
        self.num_clipped += decision.clipped
        self._measured.update(repr(decision.measured).encode())
        parts = self._parts(decision, who)
        if parts:
            self.lines.append(f"step {decision.step} of {who}: {'; '.join(parts)}")

    def _parts(self, decision: Decision, who: int) -> list[str]:
        parts = []
        if decision.found:
            parts.append(f"found {', '.join(decision.found)}")
        if (decision.cause, decision.damage) != ("healthy", "none"):
            parts.append(f"cause {decision.cause}, damage {decision.damage}")
        if decision.actions:
            parts.append(f"plan {', '.join(decision.actions)}")
        parts += [f"{name} {value}" for name, value in decision.numbers]
        if not decision.stepped:
            parts.append("refused")
        if decision.lr_mult != self._lr_mults.get(who, 1.0):
            parts.append(f"lr x {decision.lr_mult:.4g}")
        self._lr_mults[who] = decision.lr_mult
        return parts

    def measured_hash(self) -> str:
        return str(self._measured.hexdigest())


@dataclass(frozen=True, slots=True)
class Trace:
    """What is compared everywhere, and what only on the machine that recorded it."""

    decisions: tuple[str, ...]
    bits: str


def trace_of(run: Run) -> Trace:
    """Run the guarded program and write down what it was told."""
    notes = Tracing()
    end = _inspected(run, notes) if run.face == INSPECT else guarded_end(run, notes)
    causes = [", ".join(found.cause for found in guard.diagnose()) for guard in notes.guards]
    counts = f"{notes.steps} steps, {notes.num_stepped} stepped, {notes.num_clipped} clipped"
    last = f"end: {counts}; error {end.error.split(':')[0] or 'none'}; diagnosed {' | '.join(causes)}"
    bits = f"score {end.score!r}; weights {_hash(end)}; measured {notes.measured_hash()}"
    return Trace(decisions=(*notes.lines, last), bits=bits)


def _hash(end: End) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(end.weights.items()):
        digest.update(name.encode())
        # why: the bits of a NaN carry no meaning
        same_nans = value.nan_to_num(nan=-12345.0) if value.is_floating_point() else value
        digest.update(same_nans.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _inspected(run: Run, notes: Notes) -> End:
    """A loop that asks before each of its updates."""
    program = Program.of(run)
    try:
        with silence(), ExitStack() as stack:
            guards = [stack.enter_context(Guard(seat.player.model, seat.optimizer)) for seat in program.seats]
            notes.guards.extend(guards)
            for step in range(run.num_steps):
                for who, (seat, guard) in enumerate(zip(program.seats, guards, strict=True)):
                    notes.add(_asked_step(program, seat, guard, step), who)
                program.task.after_step()
    except TrainingHalted as error:
        return ended(program, error=type(error).__name__, notes=notes)
    return ended(program, notes=notes)


def _asked_step(program: Program, seat: Seat, guard: Guard, step: int) -> Outcome:
    seat.rate.before(step, guarded=False)
    batch = seat.fault.batch(step, seat.player.batch())
    with seat.fault.at(step):
        seat.optimizer.zero_grad()
        loss = seat.fault.loss(step, seat.player.loss(batch))
        loss.backward()
        proceeds = guard.inspect(loss).proceeds
        if proceeds:
            seat.optimizer.step()
        outcome = guard.commit(stepped=proceeds)
    seat.rate.after()
    return outcome


def machine() -> dict[str, str]:
    """What the bits of a run depend on."""
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
