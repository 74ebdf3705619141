"""`bench rl`: what counts as a collapse, as in time and as recovered, and what the table says."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from steadystep.lab.bench import Choice, Row, StudyJob, load
from steadystep.lab.bench.rl import JUDGE_SEEDS, STUDY, Rewards, fell_by_itself, summary, table
from steadystep.lab.rl import COLLAPSES, PROGRAMS

NAME = "wrong sign, a2c"  # begins at step 150 with seed 0


def row(arm: str, collapse: str, curve: list[list[float]], final: float, **more: Any) -> Row:
    base: Row = {"program": "a2c-grid", "collapse": collapse, "seed": 0, "arm": arm, "curve": curve, "final": final}
    return base | {"said": [], "did": [], "halted": "", "digest": "a", "steps": 240} | more


TWIN = row("plain", "", [[0, 0.1], [150, 0.9], [240, 1.0]], 1.0)
GUARDED_TWIN = row("autopilot", "", TWIN["curve"], 1.0)
LOST = [[0, 0.1], [150, 0.9], [170, 0.6], [180, 0.5], [240, 0.0]]
SAID = [[120, "loss-spike", "warn", "bad-batch"], [165, "reward-collapse", "warn", "policy-collapse"]]


def test_the_study_is_known_and_every_collapse_has_its_twin() -> None:
    assert load("rl") is STUDY
    jobs = STUDY.jobs(Choice())
    assert {job.args["seed"] for job in jobs} == set(JUDGE_SEEDS)
    assert min(JUDGE_SEEDS) >= 700  # 0 to 2 are for choosing
    healthy = {(job.args["program"], job.args["arm"]) for job in jobs if not job.args["collapse"]}
    assert healthy == {(name, arm) for name in PROGRAMS for arm in ("plain", "autopilot")}
    assert {job.args["collapse"] for job in jobs} == {"", *COLLAPSES}
    assert len({job.key for job in jobs}) == len(jobs)
    assert len(PROGRAMS) * len(JUDGE_SEEDS) >= 50
    assert {job.args["seed"] for job in STUDY.jobs(Choice(seeds=(1,)))} == {1}


def test_a_collapse_loses_half_of_what_was_gained() -> None:
    lost = Rewards(row("observe", NAME, LOST, 0.2), TWIN)
    assert lost.collapsed
    assert lost.deadline == 180  # the first evaluation at or below 0.1 + 0.8 / 2
    kept = Rewards(row("observe", NAME, [[0, 0.1], [150, 0.9], [240, 0.8]], 0.8), TWIN)
    assert not kept.collapsed
    assert kept.deadline == 240


def test_a_run_that_never_gains_has_until_the_end() -> None:
    never = Rewards(row("observe", "entropy penalty, grid", [[0, 0.1], [20, 0.05], [240, 0.2]], 0.2), TWIN)
    assert never.collapsed
    assert never.deadline == 240


@given(st.floats(0.0, 1.0) | st.just(math.nan))
def test_weights_that_are_lost_are_a_collapse(final: float) -> None:
    found = Rewards(row("observe", NAME, [[0, 0.1], [150, 0.9], [240, final]], final), TWIN)
    assert found.collapsed == (not final > 0.55)


def test_warnings_count_between_the_change_and_the_deadline() -> None:
    rows = [TWIN, GUARDED_TWIN, row("observe", NAME, LOST, 0.2, said=SAID)]
    (line,) = summary(rows)["lines"]
    assert (line["noticed"], line["lead"], line["named"]) == (15, 15, True)
    late = [[181, "reward-collapse", "warn", "policy-collapse"]]
    (line,) = summary([TWIN, row("observe", NAME, LOST, 0.2, said=late)])["lines"]
    assert (line["noticed"], line["named"]) == (None, False)
    other = [[165, "loss-spike", "warn", "same-batch"]]
    (line,) = summary([TWIN, row("observe", NAME, LOST, 0.2, said=other)])["lines"]
    assert (line["noticed"], line["named"]) == (15, False)


def test_newer_causes_are_counted_apart() -> None:
    newer = [[165, "bad-advantages", "warn", "bad-advantages"]]
    told = summary([TWIN, row("observe", NAME, LOST, 0.2, said=newer)])
    assert (told["named_in_time"], told["named_without_newer_causes"]) == (1, 0)
    told = summary([TWIN, row("observe", NAME, LOST, 0.2, said=newer + SAID)])
    assert (told["named_in_time"], told["named_without_newer_causes"]) == (1, 1)


@pytest.mark.parametrize(("level", "stayed"), [(0.95, 1), (0.94, 0), (math.nan, 0)])
def test_the_last_evaluations_are_told_beside_the_final_weights(level: float, stayed: int) -> None:
    rows = [TWIN, row("observe", NAME, LOST, 0.2, said=SAID), row("autopilot", NAME, LOST, 1.0, level=level)]
    told = summary(rows)
    assert (told["recovered"], told["stayed"]) == (1, stayed)


@pytest.mark.parametrize(("final", "share"), [(0.0, 1.0), (0.2, 1.0), (-0.1, 0.0), (math.nan, 0.0)])
def test_a_twin_that_ends_with_nothing_is_no_division_by_zero(final: float, share: float) -> None:
    rows = [TWIN | {"final": 0.0}, row("observe", NAME, LOST, final, said=SAID), row("autopilot", NAME, LOST, final)]
    (line,) = summary(rows)["lines"]
    assert (line["observed"], line["guarded"]) == (share, share)
    assert line["held"] == 1.0


@pytest.mark.parametrize(("final", "recovered"), [(0.95, 1), (0.94, 0), (math.nan, 0)])
def test_recovered_is_nearly_the_twin(final: float, recovered: int) -> None:
    rows = [TWIN, row("observe", NAME, LOST, 0.2, said=SAID), row("autopilot", NAME, LOST, final)]
    told = summary(rows)
    assert told["recovered"] == recovered
    assert told["guarded"] == 1


def test_healthy_runs_are_compared_bit_by_bit() -> None:
    loud = GUARDED_TWIN | {"said": SAID[:1], "did": [[120, "skip-step"]], "digest": "b"}
    quiet, told = summary([TWIN, GUARDED_TWIN])["healthy"], summary([TWIN, loud])["healthy"]
    assert (quiet["identical"], quiet["compared"], quiet["per_10k"]) == (1, 1, 0.0)
    assert (told["identical"], len(told["warnings"]), len(told["acts"])) == (0, 1, 1)
    assert told["per_10k"] == pytest.approx(1e4 / 240)


@pytest.mark.parametrize(
    ("scores", "fell"),
    [
        ([0.1, 0.9, 0.51, 0.9], False),  # more than half of the gain is left
        ([0.1, 0.9, 0.49, 1.0], True),
        ([0.1, 0.3, 0.1, 0.9], False),  # a quarter of what it gains in the end
        ([0.1, 0.1, 0.1], False),
        ([0.1, 0.9, math.nan], True),
    ],
)
def test_programs_that_fall_by_themselves_are_counted_apart(scores: list[float], fell: bool) -> None:
    plain = TWIN | {"curve": [[10 * i, score] for i, score in enumerate(scores)]}
    loud = GUARDED_TWIN | {"said": SAID[:1], "did": [[120, "rollback"]]}
    assert fell_by_itself(plain) == fell
    told = summary([plain, loud])["healthy"]
    parts = [told[name] for name in ("fell", "steady")]
    assert [(len(part["warnings"]), len(part["acts"])) for part in parts] == ([(1, 1), (0, 0)][:: 1 if fell else -1])
    assert (len(told["warnings"]), told["runs"]) == (1, 1)


def test_the_table_shows_halves_of_a_study_too() -> None:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(table([TWIN, row("observe", NAME, LOST, 0.2, said=SAID)]))
        console.print(table([TWIN]))
    assert NAME in shown.get()
    assert "20%" in shown.get()


@pytest.mark.slow
def test_a_collapse_is_real_and_is_noticed() -> None:
    names = ("plain", ""), ("observe", NAME)
    rows = []
    for arm, collapse in names:
        args = {"program": "a2c-grid", "collapse": collapse, "seed": 0, "arm": arm}
        rows.append(args | STUDY.run(StudyJob(key=arm, args=args)))
    (line,) = summary(rows)["lines"]
    assert line["collapsed"]
    assert line["twin"] > 0.9
