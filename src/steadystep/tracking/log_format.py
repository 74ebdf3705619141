"""The file under a run log: how it is begun, written to and ended."""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from steadystep._utils.text import logger, state_of
from steadystep.errors import TrainingHalted
from steadystep.records import SEVERITIES, Action, Incident, Outcome, Quarantined, severity_rank


def state(path: Path) -> tuple[bool, bool]:
    """Whether there is anything, and whether a crash left it without an end: what is appended must not stick to it."""
    if not path.exists() or path.stat().st_size == 0:
        return False, False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return True, file.read(1) != b"\n"


def is_gone(file: IO[str]) -> bool:
    """No name leads to it any more: what is written to it nobody will read."""
    try:
        return not file.closed and os.fstat(file.fileno()).st_nlink == 0
    except (OSError, ValueError):
        return False


def dropped(
    file: IO[str], pending: list[str], path: Path, process: int, unwritten: list[int], last_before: int
) -> None:
    """Nobody closed it: the log was let go of, or the program ends. `last_before` is the id of an older error."""
    # why last_value: at the end of a program, what ended it is no longer being handled
    last: BaseException | None = getattr(sys, "last_value", None)
    if id(last) == last_before:  # of an earlier cell of a notebook
        last = None
    end(file, pending, path, process, unwritten, sys.exc_info()[1] or last)


def end(
    file: IO[str],
    pending: list[str],
    path: Path,
    process: int,
    unwritten: list[int],
    error: BaseException | None,
) -> None:
    """The last lines and how it ended; then the file is closed."""
    if os.getpid() == process:  # what was forked off has a copy of the lines, and no business here
        line: dict[str, Any] = {"kind": "end", "how": "finished", "time": round(time.time(), 1)}
        if unwritten[0]:
            line["unwritten"] = unwritten[0]
        if error is not None:
            stopped = isinstance(error, TrainingHalted | KeyboardInterrupt | SystemExit)
            line |= {"how": "stopped" if stopped else "error", "error": f"{type(error).__name__}: {error}"[:1000]}
        pending.append(json.dumps(line) + "\n")
        write(file, pending, path)
    with suppress(OSError):  # a full disk fails once more on what the file still buffers
        file.close()


def write(file: IO[str], pending: list[str], path: Path) -> None:
    """What is pending; a disk that is full ends the log and not the training."""
    lines = "".join(pending)
    pending.clear()
    if file.closed:
        return
    try:
        file.write(lines)
        file.flush()
    except OSError as error:
        logger.warning("cannot write the run log %s (%s); training continues without it", path, error.strerror or error)
        with suppress(OSError):
            file.close()


LARGEST_STEP = 2**62


def step_of(value: object) -> int:
    """Raises TypeError for what is not a step."""
    if type(value) is not int or not 0 <= value < LARGEST_STEP:
        raise TypeError("not a step")
    return value


def count_of(value: object) -> int:
    """A number of things; 0 for anything else."""
    return value if type(value) is int and 0 < value < LARGEST_STEP else 0


def incident_card(incident: Incident) -> str:
    """What, what was done, why, what to try; only what is known."""
    rows = [f"**Step {incident.step}: {incident.cause}** ({incident.severity})"]
    for title, text in (
        ("Evidence", incident.evidence),
        ("Done", incident.done),
        ("Origin", incident.origin),
        ("Try", incident.advice),
        ("Bundle", f"`{incident.bundle}`" if incident.bundle else ""),
    ):
        if text:
            rows.append(f"* {title}: {text}")
    return "\n".join([rows[0], "", *rows[1:]])


_JUMP = "learning-rate-jump"
_REFUSED = {
    Action.SKIP_STEP: "update skipped",
    Action.BACK_OFF_SCALE: "update skipped, loss scale halved",
    Action.LEAVE_OUT: "no finite micro-batch left, update skipped",
}


def describe(outcome: Outcome) -> str:
    """Return one sentence about `outcome`: what was found, what was done, and why."""
    diagnosis = outcome.diagnosis
    began = f"; origin: {outcome.origin}" if outcome.origin else ""
    return (
        f"step {outcome.step}: {diagnosis.evidence or outcome.plan.reason}: {did(outcome)} [{diagnosis.cause}]{began}"
    )


def did(outcome: Outcome) -> str:
    """What was done, as a clause."""
    plan = outcome.plan
    if outcome.restored is not None:
        cut = f", learning rate limited to {plan.lr:.3g}" if plan.lr is not None else ""
        how = "bit-identical" if outcome.exact else "not verified as bit-identical"
        again = f" and replayed {outcome.replayed} updates ({how})" if outcome.replayed else ""
        kept = f", {len(outcome.quarantined)} steps in quarantine" if outcome.quarantined else ""
        return f"rolled back to {state_of(plan.to)}{again}{kept}{cut}"
    done = []
    if Action.RESTORE_MOMENTS in plan.actions:
        done.append(f"optimizer restored to {state_of(plan.to)}")
    if plan.rank is not None:
        done.append(f"weights and moments copied from rank {plan.rank}")
    if plan.kept:
        done.append("kept objects restored")
    if plan.lr is not None:
        done.append(f"learning rate limited to {plan.lr:.3g}")
    if outcome.left_out:
        done.append(f"updated without micro-batch {', '.join(str(i) for i in outcome.left_out)} of the group")
    elif not outcome.stepped:
        done.append(next((_REFUSED[step] for step in plan.actions if step in _REFUSED), "update skipped"))
    elif plan.norm is not None:
        done.append(f"gradient scaled down to {plan.norm:.3g}")
    elif outcome.signals is not None and any(flip.repaired for flip in outcome.signals.bit_flips):
        done.append("bit put back, then updated")
    elif any(f.severity == "critical" for f in outcome.findings):
        done.append("updated anyway (observe mode)")
    return ", ".join(done) or "updated"


_MOST_RANKS = 64
_MOST_NAMES = 16  # of the tensors a finding is about: a NaN is often in all of them


def incident_line(outcome: Outcome, run_dir: Path) -> dict[str, Any]:
    """Everything that is known about it; the bundle's folder as seen from `run_dir`, so that both can be moved."""
    bundle = Path(outcome.incident) if outcome.incident else None
    line: dict[str, Any] = {
        "kind": "incident",
        "step": outcome.step,
        "stepped": outcome.stepped,
        "left_out": list(outcome.left_out),
        "done": did(outcome),
        "diagnosis": _short(json.loads(outcome.diagnosis.to_json())),
        "plan": json.loads(outcome.plan.to_json()),
    }
    if outcome.restored is not None:
        line |= {"restored": outcome.restored, "replayed": outcome.replayed}
    if outcome.quarantined:
        line["quarantined"] = [json.loads(each.to_json()) for each in outcome.quarantined]
    if outcome.lr_mult != 1.0:
        line["lr_mult"] = outcome.lr_mult
    if outcome.origin:
        line["origin"] = outcome.origin
    if ranks := bad_ranks_of(outcome):
        line["ranks"] = list(ranks)
    if bundle is not None:
        line["bundle"] = str(bundle.relative_to(run_dir) if bundle.is_relative_to(run_dir) else bundle)
    return line


def incident_of(line: Mapping[str, Any], run_dir: Path) -> Incident:
    """What a line of the log in `run_dir` says; TypeError and the like when it says nothing."""
    diagnosis, restored = line["diagnosis"], line.get("restored")
    findings = tuple(
        (str(f["detector"]), f["severity"] if f["severity"] in SEVERITIES else "info", str(f.get("what", "")))
        for f in diagnosis.get("findings", ())
    )
    loudest = max((severity_rank(severity) for _, severity, _ in findings), default=2)
    return Incident(
        step=line["step"],
        cause=str(diagnosis["cause"]),
        severity=SEVERITIES[loudest],
        evidence=str(diagnosis.get("evidence", "")),
        advice=str(diagnosis.get("advice", "")),
        done=str(line.get("done", "")),
        stepped=bool(line.get("stepped", True)),
        restored=restored if type(restored) is int else None,
        origin=str(line.get("origin", "")),
        bundle=str(run_dir / str(line["bundle"])) if line.get("bundle") else "",
        findings=findings,
        refused_lr=_refused_lr(diagnosis.get("findings", ()), line.get("plan") or {}),
        scaled_to=float_of((line.get("plan") or {}).get("norm")),
        replayed=line["replayed"] if type(line.get("replayed")) is int else 0,
        seconds=float_of(line.get("seconds")),
        quarantined=tuple(Quarantined.from_json(json.dumps(each)) for each in line.get("quarantined", ())),
        ranks=tuple(map(step_of, line.get("ranks", ()))),
    )


def _refused_lr(findings: Iterable[Mapping[str, Any]], plan: Mapping[str, Any]) -> float | None:
    if plan.get("lr") is None:
        return None
    return next((float_of(f.get("value")) for f in findings if f["detector"] == _JUMP), None)


def float_of(value: object) -> float | None:
    """A number; None for anything else."""
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def incident_from(outcome: Outcome) -> Incident:
    """The same, without the way through a file."""
    findings = tuple((f.detector, f.severity, f.what) for f in outcome.findings)
    return Incident(
        step=outcome.step,
        cause=outcome.diagnosis.cause,
        severity=SEVERITIES[max((severity_rank(severity) for _, severity, _ in findings), default=2)],
        evidence=outcome.diagnosis.evidence or outcome.plan.reason,
        advice=outcome.diagnosis.advice,
        done=did(outcome),
        stepped=outcome.stepped,
        restored=outcome.restored,
        origin=outcome.origin,
        bundle=outcome.incident,
        findings=findings,
        refused_lr=next((f.value for f in outcome.findings if f.detector == _JUMP), None)
        if outcome.plan.lr is not None
        else None,
        scaled_to=outcome.plan.norm,
        replayed=outcome.replayed,
        quarantined=outcome.quarantined,
        ranks=bad_ranks_of(outcome),
    )


def bad_ranks_of(outcome: Outcome) -> tuple[int, ...]:
    """Ranks whose own loss, batch or weights were found wrong at this step, at most 64 of them."""
    if outcome.signals is None:
        return ()
    odd = (name.rpartition(" on rank ")[2].split(", ") for name in outcome.signals.odd_replicas)
    named = {int(number) for numbers in odd for number in numbers if number.isdecimal()}
    return tuple(sorted(named.union(outcome.signals.bad_ranks)))[:_MOST_RANKS]


def _short(diagnosis: dict[str, Any]) -> dict[str, Any]:
    for finding in diagnosis["findings"]:
        rest = len(finding["where"]) - _MOST_NAMES
        if rest > 0:
            finding["where"] = [*finding["where"][:_MOST_NAMES], f"and {rest} more"]
    return diagnosis
