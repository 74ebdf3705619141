"""Effective training time: what is in the final weights, and what incidents cost."""

import pytest

from steadystep.records import Incident, Quarantined
from steadystep.runs import duration, effective_time


def incident(step: int, **more: object) -> Incident:
    return Incident(step=step, cause="bad-batch", severity="act", **more)  # type: ignore[arg-type]


def test_a_run_without_incidents_is_all_there() -> None:
    told = effective_time((), 500, seconds=50.0)
    assert (told.updates, told.share, told.step_seconds, told.seconds_lost) == (500, 1.0, 0.1, 0)
    assert effective_time((), 0).share is None


def test_a_skipped_step_and_a_finding_that_was_only_reported() -> None:
    told = effective_time([incident(100, stepped=False), incident(200, stepped=True)], 400, seconds=40.0)
    assert (told.updates, told.share) == (399, 399 / 400)
    (cost,) = told.incidents
    assert (cost.step, cost.lost, cost.replayed, cost.seconds) == (100, 1, 0, 0.1)


def test_a_rollback_loses_what_it_does_not_replay_and_replaying_is_work_too() -> None:
    """At step 227 with 227 updates: back to 180, 28 of them replayed."""
    left_out = tuple(Quarantined(step=step, cause="bad-batch") for step in range(200, 220))
    back = incident(227, stepped=False, restored=208, replayed=28, quarantined=left_out, seconds=4.0)
    told = effective_time([back], 480, seconds=4.0 + 479 * 0.1)
    assert (told.updates, told.replayed) == (460, 28)
    assert told.share == 460 / 508
    (cost,) = told.incidents
    assert (cost.lost, cost.quarantined) == (20, tuple(range(200, 220)))
    assert cost.seconds == pytest.approx(20 * 0.1 + 3.9)
    assert told.numbers() == {"updates": 460, "effective_share": 460 / 508, "seconds_lost": cost.seconds}
    assert told.as_dict()["incidents"][0]["lost"] == 20


def test_a_rollback_that_replays_everything_costs_only_time() -> None:
    told = effective_time([incident(90, stepped=False, restored=91, replayed=50, seconds=1.0)], 120)
    assert (told.updates, told.share) == (120, 120 / 170)
    assert told.incidents[0].lost == 0
    assert (told.incidents[0].seconds, told.seconds_lost, told.step_seconds) == (None, None, None)


def test_only_the_last_process_is_timed() -> None:
    slow = incident(10, stepped=False, restored=5, seconds=99.0)
    assert effective_time([slow], 300, seconds=20.0, since=100).step_seconds == 0.1


def test_the_last_line_of_a_step_counts() -> None:
    told = effective_time([incident(5, stepped=True), incident(5, stepped=False)], 10)
    assert told.updates == 9


@pytest.mark.parametrize("end", [None, {}, {"time": "x"}, {"time": 1.0}, {"time": float("inf")}])
def test_a_duration_needs_both_ends(end: dict[str, object] | None) -> None:
    assert duration({"time": 2.0}, end) is None
    assert duration({"time": 2.0}, {"time": 5.5}) == 3.5
