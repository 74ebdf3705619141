"""Public training curves through the detectors. They are not ours to ship: `STEADYSTEP_TRACES` says where they are."""

import csv
import math
import os
from collections import Counter
from pathlib import Path

import pytest

from steadystep.config import Config
from steadystep.noticing import detectors
from steadystep.records import Finding, Signals

FOLDER = Path(os.environ.get("STEADYSTEP_TRACES", "/nowhere"))
HEALTHY = ["llmc_gpt2_124M_20k", "optimizers_8d61", "quantfp4_433c", "scaleup1B_a", "valueembed_75a3"]

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="STEADYSTEP_TRACES does not point at the curves")


def curve(name: str) -> list[tuple[float, float, float]]:
    """Loss, gradient norm, learning rate; 1 where the last two were not logged."""
    with (FOLDER / f"{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    return [(float(row["loss"]), float(row["grad_norm"] or 0) or 1.0, float(row["lr"] or 1.0)) for row in rows]


def findings(points: list[tuple[float, float, float]]) -> list[Finding]:
    noticing = detectors(Config())
    return [
        finding
        for step, (loss, norm, lr) in enumerate(points)
        for detector in noticing
        for finding in detector.update(Signals(step=step, loss=loss, grad_norm=norm, lr=lr))
    ]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gets_notes_at_most(name: str) -> None:
    told = Counter(finding.severity for finding in findings(curve(name)))
    assert set(told) <= {"info"}, told


def test_the_gradient_norm_that_came_before_the_spike_is_caught() -> None:
    """BLOOM-104B, experiment 11: the norm rose 20 times one step before the loss went from 3.1 to 7.7."""
    quiet = [(3.06 + 0.02 * math.sin(i), 12_950 * (1 + 0.1 * math.sin(1.7 * i)), 3e-5) for i in range(500)]
    found = findings([*quiet, *curve("tr8_104B_exp11_11447_spike_recovers_after_2k")])
    first = next(f for f in found if f.severity != "info")
    assert (first.detector, first.severity, first.step) == ("gradient-spike", "act", 501)
