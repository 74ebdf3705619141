"""Curves of other people's runs, or our own, through the detectors alone. Nothing is acted upon.

    STEADYSTEP_TRACES=FOLDER python benchmarks/traces.py [--json]

The folder holds .csv files with the columns step, loss and perhaps grad_norm and lr; a short one is an incident and is
laid over a healthy stretch of a long one.
"""

import csv
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from steadystep.config import Config
from steadystep.records import Finding, Signals
from stored.table import show

Point = tuple[float, float, float]
"""loss, grad_norm, lr"""
_UNKNOWN_NORM, _UNKNOWN_LR = 1.0, 3e-4


def read(path: Path) -> list[Point]:
    """The curve in a file; a norm or a rate that was not logged is a constant."""
    with path.open(encoding="utf-8", newline="") as lines:
        return [
            (
                float(row["loss"]),
                float(row.get("grad_norm") or 0.0) or _UNKNOWN_NORM,
                float(row.get("lr") or 0.0) or _UNKNOWN_LR,
            )
            for row in csv.DictReader(lines)
            if row["loss"]
        ]


def inside(incident: Sequence[Point], healthy: Sequence[Point], *, every: int, at: int = 3000) -> list[Point]:
    """A short incident, logged `every` so many steps, on top of a healthy stretch; it stays as it ended for 300 steps.

    Between logged steps it goes along a straight line, and the healthy run's own noise is kept.
    """
    first_loss, first_norm, _ = incident[0]
    offsets = [(loss - first_loss, norm / first_norm) for loss, norm, _ in incident]
    points = list(healthy[:at])
    for i in range((len(incident) - 1) * every + 300):
        row, part = min(i // every, len(incident) - 1), i % every / every
        (a, b), (c, d) = offsets[row], offsets[min(row + 1, len(incident) - 1)]
        loss, norm, lr = healthy[at + i]
        points.append((loss + a + part * (c - a), norm * (b + part * (d - b)), lr))
    return points + list(healthy[len(points) : len(points) + 1000])


def _every(path: Path) -> int:
    with path.open(encoding="utf-8", newline="") as lines:
        steps = [int(row["step"]) for row in csv.DictReader(lines)]
    return steps[1] - steps[0]


def replay(points: Iterable[Point]) -> list[Finding]:
    """All that the detectors of the default configuration say."""
    from steadystep.detectors.build import build_detectors

    made = build_detectors(Config())
    return [
        finding
        for step, (loss, norm, lr) in enumerate(points)
        for signals in [Signals(step=step, loss=loss, grad_norm=norm, lr=lr)]
        for detector in made
        for finding in detector.update(signals)
    ]


def report(folders: Sequence[Path]) -> dict[str, Any]:
    """One line per file."""
    files = sorted(path for folder in folders for path in folder.iterdir() if path.suffix == ".csv")
    curves = {path: read(path) for path in files}
    long = [curve for curve in curves.values() if len(curve) > 5000]
    lines: list[dict[str, Any]] = []
    for path, curve in curves.items():
        if len(curve) < 50 and not long:
            continue
        points = inside(curve, long[0], every=_every(path)) if len(curve) < 50 else curve
        found = replay(points)
        said = Counter((f.detector, f.severity) for f in found)
        loud = [f.step for f in found if f.severity in ("act", "critical")]
        severities = Counter(f.severity for f in found)
        lines.append(
            {
                "file": path.stem,
                "steps": len(points),
                **{severity: severities[severity] for severity in ("info", "warn", "act", "critical")},
                "warn/10k": severities["warn"] * 1e4 / len(points),
                "first act": min(loud, default=math.nan),
                "who": ", ".join(f"{who} {how} {n}" for (who, how), n in said.most_common()),
            }
        )
    return {"lines": lines}


def main() -> int:
    if "STEADYSTEP_TRACES" not in os.environ:
        sys.exit("traces: set STEADYSTEP_TRACES to a folder of .csv files")
    told = report([Path(os.environ["STEADYSTEP_TRACES"])])
    if "--json" in sys.argv[1:]:
        print(json.dumps(told))
    else:
        lines = told["lines"]
        show("Detectors alone", list(lines[0]) if lines else [], [list(line.values()) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
