"""An incident, to a line of the log and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadystep.records import Outcome
from steadystep.track.messages import did
from steadystep.track.run import Incident

_MOST_NAMES = 16  # of the tensors a finding is about: a NaN is often in all of them
_SEVERITIES = ("info", "warn", "act", "critical")


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
        line["restored"] = outcome.restored
    if outcome.lr_mult != 1.0:
        line["lr_mult"] = outcome.lr_mult
    if outcome.origin:
        line["origin"] = outcome.origin
    if bundle is not None:
        line["bundle"] = str(bundle.relative_to(run_dir) if bundle.is_relative_to(run_dir) else bundle)
    return line


def incident_of(line: Mapping[str, Any], run_dir: Path) -> Incident:
    """What a line of the log in `run_dir` says; TypeError and the like when it says nothing."""
    diagnosis, restored = line["diagnosis"], line.get("restored")
    findings = tuple(
        (str(f["detector"]), f["severity"] if f["severity"] in _SEVERITIES else "info", str(f.get("what", "")))
        for f in diagnosis.get("findings", ())
    )
    loudest = max((_SEVERITIES.index(severity) for _, severity, _ in findings), default=2)
    return Incident(
        step=line["step"],
        cause=str(diagnosis["cause"]),
        severity=_SEVERITIES[loudest],
        evidence=str(diagnosis.get("evidence", "")),
        advice=str(diagnosis.get("advice", "")),
        done=str(line.get("done", "")),
        stepped=bool(line.get("stepped", True)),
        restored=restored if type(restored) is int else None,
        origin=str(line.get("origin", "")),
        bundle=str(run_dir / str(line["bundle"])) if line.get("bundle") else "",
        findings=findings,
    )


def incident_from(outcome: Outcome) -> Incident:
    """The same, without the way through a file."""
    findings = tuple((f.detector, f.severity, f.what) for f in outcome.findings)
    return Incident(
        step=outcome.step,
        cause=outcome.diagnosis.cause,
        severity=_SEVERITIES[max((_SEVERITIES.index(severity) for _, severity, _ in findings), default=2)],
        evidence=outcome.diagnosis.evidence or outcome.plan.reason,
        advice=outcome.diagnosis.advice,
        done=did(outcome),
        stepped=outcome.stepped,
        restored=outcome.restored,
        origin=outcome.origin,
        bundle=outcome.incident,
        findings=findings,
    )


def _short(diagnosis: dict[str, Any]) -> dict[str, Any]:
    for finding in diagnosis["findings"]:
        rest = len(finding["where"]) - _MOST_NAMES
        if rest > 0:
            finding["where"] = [*finding["where"][:_MOST_NAMES], f"and {rest} more"]
    return diagnosis
