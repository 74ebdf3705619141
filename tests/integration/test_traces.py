"""Public training curves through the detectors. They are not ours to ship: `STEADYSTEP_TRACES` says where they are."""

import csv
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steadystep.config import Config
from steadystep.detectors.build import build_detectors
from steadystep.records import Finding, Signals
from steadystep.runs.diagnosis import diagnose
from steadystep.runs.open import open_run
from steadystep.runs.run import Run, Series

FOLDER = Path(os.environ.get("STEADYSTEP_TRACES", "/nowhere"))
HEALTHY = ["llmc_gpt2_124M_20k", "optimizers_8d61", "quantfp4_433c", "scaleup1B_a", "valueembed_75a3"]

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="STEADYSTEP_TRACES does not point at the curves")


def curve(name: str) -> list[tuple[float, float, float]]:
    """Loss, gradient norm, learning rate; 1 where the last two were not logged."""
    with (FOLDER / f"{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    return [(float(row["loss"]), float(row["grad_norm"] or 0) or 1.0, float(row["lr"] or 1.0)) for row in rows]


def findings(points: list[tuple[float, float, float]]) -> list[Finding]:
    """The curves know of no tensors, so all of them count as one."""
    noticing = build_detectors(Config())
    looks = (
        Signals(step=step, loss=loss, grad_norm=norm, norms=(norm,), names=("all",), lr=lr)
        for step, (loss, norm, lr) in enumerate(points)
    )
    return [finding for look in looks for detector in noticing for finding in detector.update(look)]


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


@pytest.mark.parametrize("name", HEALTHY)
def test_the_doctor_calls_a_healthy_run_healthy(name: str) -> None:
    reading = diagnose(open_run(FOLDER / f"{name}.csv"))
    assert reading.healthy, reading.verdict
    assert reading.plans == ()
    assert {pattern.severity for pattern in reading.findings} <= {"info"}


def piece(run: Run, first: int, last: int, every: int) -> Run:
    """The points of some steps, as in the log of a resumed run or of a thrifty one."""

    def part(series: Series) -> Series:
        inside = (series.steps >= first) & (series.steps < last)
        return Series(series.steps[inside][::every], series.values[inside][::every])

    return replace(run, loss=part(run.loss), lr=part(run.lr), grad_norm=part(run.grad_norm), validation={})


@pytest.mark.parametrize("name", HEALTHY)
def test_no_piece_of_a_healthy_run_is_called_faulty(name: str) -> None:
    run = open_run(FOLDER / f"{name}.csv")
    end = int(run.loss.steps[-1])
    early = [(0, 100, 1), (0, 300, 1), (0, 1000, 1), (0, 3000, 1), (0, end, 10), (0, end, 50)]
    later = [(1000, 2000, 1), (end // 2, end, 1), (end // 2, end // 2 + 400, 1), (end - 300, end, 1)]
    for first, last, every in [*early, *later, (end // 3, end // 3 + 1000, 10)]:
        reading = diagnose(piece(run, first, last, every), guard=False)
        assert reading.healthy is not False, (first, last, every, reading.verdict)
        assert reading.healthy or first > 0, (last, every, reading.verdict)
    assert diagnose(piece(run, 0, 35, 1)).outcome == "too-short"


INCIDENTS = {
    "tr8_104B_exp11_11447_spike_recovers_after_2k": ("spike-unhealed", 1),
    "tr8_104B_glitch2_6930_diverge": ("divergence", 1),
    "tr1_13B_29050_spike_recovers": ("spike-unhealed", 3),
}


def placed(incident: Run, healthy: Run, at: int) -> Run:
    """The points of an incident after `at` points of a healthy run, in the units of the latter; there the log ends."""
    before, after = healthy.loss.values[:at], incident.loss.values
    norms = incident.grad_norm.values
    factor = norms / norms[0] if norms[0] > 0.0 else np.ones(len(norms))
    beside = healthy.grad_norm.values[:at] if len(healthy.grad_norm) else np.exp(0.2 * np.sin(np.arange(at) * 1.7))
    loss = np.concatenate([before, np.median(before[-50:]) + after - after[0]])
    norm = np.concatenate([beside, np.median(beside[-50:]) * factor])
    steps = np.arange(len(loss), dtype=np.int64) * 10
    return Run(name="placed", path=FOLDER, source="csv", loss=Series(steps, loss), grad_norm=Series(steps, norm))


@pytest.mark.parametrize("background", HEALTHY)
@pytest.mark.parametrize("name", INCIDENTS)
def test_the_doctor_finds_an_incident_inside_a_healthy_run(name: str, background: str) -> None:
    kind, onset = INCIDENTS[name]
    incident, healthy = open_run(FOLDER / f"{name}.csv"), open_run(FOLDER / f"{background}.csv")
    for at in (600, 1100, len(healthy.loss) - 100):
        reading = diagnose(placed(incident, healthy, at), guard=False)
        assert not reading.healthy
        assert reading.findings[0].kind == kind
        assert abs(reading.findings[0].step - 10 * (at + onset)) <= 10
        assert [pattern.kind for pattern in reading.troubles] == [kind]


def test_the_doctor_names_the_signal_that_came_first() -> None:
    incident = open_run(FOLDER / "tr8_104B_exp11_11447_spike_recovers_after_2k.csv")
    reading = diagnose(placed(incident, open_run(FOLDER / "llmc_gpt2_124M_20k.csv"), 5000))
    assert "gradient norm came first" in reading.findings[0].evidence
    assert "from step 50010 on" in reading.findings[0].evidence
    assert reading.plans[0].step == 50010
