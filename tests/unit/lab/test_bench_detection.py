"""The detection study: what counts as harmful, noticed, in time and false."""

import io
import json
import math

import pytest
from rich.console import Console

from steadystep.faults import KINDS
from steadystep.lab.bench import faulty_arms
from steadystep.lab.bench import faulty_jobs as faulty
from steadystep.lab.bench.detection import STUDY, summary, table
from steadystep.lab.bench.faulty_arms import spiked
from steadystep.lab.bench.faulty_jobs import Twins, median, worst
from steadystep.lab.bench.faulty_run import TRIALS, first_step
from steadystep.lab.bench.recovery import STUDY as RECOVERY
from steadystep.lab.bench.rival_rules import Sample
from steadystep.lab.bench.study import Choice, StudyJob
from steadystep.records import Signals
from tests.unit.lab.bench_rows import row, twins

NAN = math.nan


def healthy_row(**rest) -> dict:
    made = {"kind": "healthy", "task": "gpt", "seed": 0, "arm": "autopilot", "num_steps": 5000, "steps": 5000}
    return made | {"warnings": 1, "acts": 0, "said": {"slow-divergence warn": 1}, "alarms": {}, "spikes": {}} | rest


def test_harm_is_more_than_any_twin_that_misses_a_batch() -> None:
    rows = [*twins(), *twins(seed=1, worst=1.05)]
    made = Twins(rows)
    assert made.limit("clusters") == 1.05  # of all seeds
    assert made.limit("gpt") == 1.01  # and one per cent where nothing is known
    assert made.fine(row("unguarded", 1.05))
    assert not made.fine(row("unguarded", 1.06))
    assert not made.fine(row("unguarded", NAN))
    assert not made.has(row("unguarded", 1.0, seed=7))


def test_recall_delay_and_false_alarms() -> None:
    rows = [
        *twins(),
        row("unguarded", 2.0, trial="gradients x1e4", noticed=203, said="gradient-spike: x", alarms={"ZClip": 201}),
        row("unguarded", NAN, trial="NaN in a gradient", noticed=200, said="non-finite: x", alarms={}),
        row("unguarded", 1.5, trial="zeroed layer", alarms={"ZClip": 230}),
        row("unguarded", 1.0, trial="moments lost", noticed=210, said="loss-spike: x"),
        healthy_row(alarms={"ZClip": 250, "KillLossSpike": 5}),
        healthy_row(seed=1, alarms={"ZClip": 250, "KillLossSpike": 0}),
    ]
    told = summary(rows)
    who = {line["name"]: line for line in told["who"]}
    assert (told["harmful_runs"], told["harmless_runs"], told["healthy_steps"]) == (3, 1, 10_000)
    assert (who["steadystep"]["noticed"], who["steadystep"]["recall"]) == (2, pytest.approx(2 / 3))
    assert (who["steadystep"]["median_delay"], who["steadystep"]["alarms_per_10k"]) == (0.0, 2.0)
    assert (who["ZClip"]["noticed"], who["ZClip"]["alarms_per_10k"], who["ZClip"]["acts_per_10k"]) == (2, 500, 500)
    assert (who["KillLossSpike"]["alarms_per_10k"], who["KillLossSpike"]["acts_per_10k"]) == (5, 0)  # only logs
    assert who["SPAM"]["runs"] == 0  # under SGD it sees nothing
    faults = {line["fault"]: line for line in told["faults"]}
    assert faults["zeroed layer"]["missed_on"] == {"clusters": 1}
    assert faults["moments lost"]["spoke_though_harmless"] == 1
    assert json.loads(json.dumps(told))["false"][0]["warnings"] == 2


def slow_row(noticed: int | None, *, arm: str = "unguarded", rise: float = 0.005) -> dict:
    curve = {str(step): 2.0 + rise * max(0, step - 200) for step in range(190, 640, 10)}
    return row(arm, 3.0, trial="LR +1 % a step", task="gpt", num_steps=640, noticed=noticed, curve=curve)


def test_lead_is_the_time_until_two_tenths_of_a_nat() -> None:
    falling = {str(step): 2.0 - 0.001 * (step - 190) for step in range(190, 640, 10)}
    clean = row("clean", 1.0, task="gpt", num_steps=640, curve=falling)
    made = Twins([clean])
    assert made.lead(slow_row(210), 210, than="best") == 30  # 2.2 at step 240
    assert made.lead(slow_row(210), 210, than="twin") == 30  # its twin is at 1.95 by then, and at 1.96 ten steps before
    assert made.lead(slow_row(300), 300, than="best") == -60
    assert made.lead(slow_row(None), None, than="best") == 240 - 640
    assert made.lead(slow_row(210, rise=0.0), 210, than="best") is None  # no damage
    assert made.lead(slow_row(210, rise=0.0001), 210, than="twin") is not None  # but the twin went on learning
    told = summary([clean, slow_row(210), slow_row(300)])
    assert told["slow"][0] | {"median_lead_over_twin": 0} == {
        "fault": "LR +1 % a step",
        "task": "gpt",
        "runs": 2,
        "damaged": 2,
        "in_time": 1,
        "median_lead": -60.0,
        "shortest_lead": -60.0,
        "median_lead_over_twin": 0,
        "median_after": 10.0,
    }


def test_nan_counts_as_the_worst() -> None:
    assert median([NAN, 1.0, 2.0]) == 2.0
    assert math.isnan(worst([1.0, NAN]))
    assert math.isnan(median([]))


def test_the_study_is_large_enough_and_on_seeds_of_its_own() -> None:
    jobs = STUDY.jobs(Choice())
    broken = [job for job in jobs if job.args["arm"] == "unguarded"]
    assert {TRIALS[job.args["trial"]].spec["kind"] for job in broken} == set(KINDS)
    assert len(broken) >= 280  # some are harmless, and 200 must be left
    assert sum(job.args["num_steps"] for job in jobs if job.args["kind"] == "healthy") >= 200_000
    assert {job.args["seed"] for job in jobs} <= set(range(903, 913))
    assert all(100 < first_step(seed) < 480 - 150 for seed in range(10))
    assert len({job.key for job in jobs}) == len(jobs)
    shared = {job.key for job in RECOVERY.jobs(Choice())} & {job.key for job in jobs}
    assert shared == {job.key for job in jobs if job.args["kind"] == "run"}
    assert (STUDY.store, STUDY.parts) == (RECOVERY.store, RECOVERY.parts)


def test_one_spike_on_paper_leaves_the_stream_alone() -> None:
    values = [1.0 + 0.01 * (step % 7) for step in range(400)]
    stream = [Sample(loss=x, norm=x, norms=(x,)) for x in values]
    signals = [Signals(step=i, loss=x, grad_norm=x, norms=(x,), names=("w",), lr=1e-3) for i, x in enumerate(values)]
    found = spiked(stream, signals, 400)
    assert found["loss x5"]["tried"] == 8
    assert found["loss x5"]["SpikeDetection"] == found["loss x5"]["SkipStep"] == 8
    assert found["loss x1.5"]["SpikeDetection"] == found["gradient x5"]["SpikeDetection"] == 0
    assert found["gradient x5"]["ZClip"] == 8
    assert found["loss x5"]["notes"] == 8


def test_a_real_run_and_what_everybody_says_about_it() -> None:
    scope = faulty.Scope(seeds=(0,), trials=(TRIALS["NaN in a gradient"],), tasks=("clusters",), shorter=270)
    (job,) = faulty.broken(scope, "unguarded")
    made = faulty.make(job)
    assert (made["noticed"], made["said"]) == (200, "non-finite: non-finite-gradient")
    assert math.isnan(made["score"])
    assert not made["finite"]
    assert made["alarms"]["SkipStep"] == 200
    assert made["alarms"]["SpikeDetection"] == 201
    assert "ZClip" not in made["alarms"]  # NaN > limit is False
    assert made["steps"] == 209  # then there is nothing more to see


def test_a_healthy_run_is_counted() -> None:
    made = faulty_arms.make_healthy(StudyJob(key="", args={"task": "epochs", "seed": 0, "num_steps": 120}))
    assert (made["steps"], made["warnings"], made["acts"]) == (120, 0, 0)
    assert made["alarms"]["AutoClip"] > 60  # nine in ten
    assert made["spikes"]["both x5"]["tried"] == 8


def test_the_table_says_who_missed_what(tmp_path) -> None:
    rows = [
        *twins(),
        row("unguarded", 1.5, trial="zeroed layer"),
        row("unguarded", 1.5, trial="flipped bit", noticed=200, said="non-finite: x"),
        healthy_row(alarms={"ZClip": 3}, spikes={"loss x2": {"tried": 8, "steadystep": 0, "notes": 4, "ZClip": 0}}),
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(rows))
    text = console.export_text()
    assert "2 harmful runs, 5,000 healthy steps" in text
    assert "1 of 2" in text
    assert "clusters 1.030" in text
    assert "50.0 %" in text
    pytest.importorskip("matplotlib")
    assert STUDY.figure is not None
    STUDY.figure(rows, tmp_path / "detection.png")
    assert (tmp_path / "detection.png").stat().st_size > 5000
