"""Which signs of trouble belong together, and when the present one began."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from steadystep.policy import Budget, Episode
from steadystep.records import Diagnosis, Finding, Outcome, Plan, Severity


def sign(
    step: int, *, since: int | None = None, severity: Severity = "act", detector: str = "not-healing"
) -> tuple[Finding, ...]:
    return (Finding(detector=detector, step=step, severity=severity, value=2.0, limit=1.0, since=since),)


def noted(*signs: tuple[Finding, ...]) -> Episode:
    episode = Episode()
    for findings in signs:
        episode.note(findings)
    return episode


def test_nothing_noted_is_calm() -> None:
    assert Episode().first_sign is None
    assert Episode().calm(0)
    assert Episode().suspected_since(0) is None


def test_notes_and_warnings_are_no_signs() -> None:
    for severity in ("info", "warn"):
        episode = noted(sign(10, severity=severity, since=3))
        assert episode.first_sign is None
        assert episode.calm(10)
    assert noted(sign(10, severity="critical")).first_sign == 10


def test_it_began_where_the_earliest_finding_of_the_step_says() -> None:
    assert noted(sign(100, since=90) + sign(100, since=80) + sign(100)).first_sign == 80
    assert noted(sign(100)).first_sign == 100


def test_signs_close_together_are_one_trouble() -> None:
    assert noted(sign(100), sign(150)).first_sign == 100
    assert noted(sign(100), sign(151)).first_sign == 151
    assert noted(sign(100), sign(130), sign(170), sign(210)).first_sign == 100


def test_a_later_sign_that_began_earlier_moves_the_beginning() -> None:
    assert noted(sign(100), sign(120, since=60)).first_sign == 60


def test_bad_batches_for_ever_are_not_one_trouble() -> None:
    episode = noted(*(sign(step) for step in range(100, 401, 50)))
    assert episode.first_sign == 100
    episode.note(sign(440))
    assert episode.first_sign == 440


def test_calm_comes_ten_steps_after_the_last_sign() -> None:
    episode = noted(sign(100), sign(105))
    assert [episode.calm(step) for step in (105, 115, 116)] == [False, False, True]


def test_a_rollback_closes_it() -> None:
    episode = noted(sign(100, detector="slow-divergence", since=40))
    episode.close()
    assert episode.first_sign is None
    assert episode.suspected_since(100) is None
    assert episode.calm(100)


def test_a_budget_closes_it_when_a_rollback_was_carried_out() -> None:
    budget = Budget()
    budget.see(Diagnosis(findings=sign(100)))
    plan = Plan(actions=("rollback",), to=40)
    budget.count(Outcome(step=100, reading=1.0, stepped=False, plan=plan))
    assert budget.episode.first_sign == 100
    budget.count(Outcome(step=101, reading=1.0, stepped=False, plan=plan, restored=41))
    assert budget.episode.first_sign is None


def test_a_suspicion_lasts_for_fifty_steps_and_needs_no_severity() -> None:
    episode = noted(sign(100, severity="info", detector="slow-divergence", since=70))
    assert episode.first_sign is None
    assert [episode.suspected_since(step) for step in (100, 150, 151)] == [70, 70, None]
    assert noted(sign(100, severity="info", detector="loss-spike", since=70)).suspected_since(100) is None


def test_a_jump_that_stays_is_a_suspicion_too() -> None:
    assert noted(sign(100, severity="warn", since=70)).suspected_since(100) == 70


def test_a_sign_belongs_to_the_trouble_under_way_or_is_the_beginning_of_another() -> None:
    """What `note` would call the first sign, asked beforehand and with nothing changed."""
    assert Episode().began(100, 90) == 90
    episode = noted(sign(100))
    assert [episode.began(step, step - 10) for step in (150, 151)] == [100, 141]
    assert episode.began(150, 60) == 60
    assert episode.first_sign == 100
    long = noted(*(sign(step) for step in range(100, 401, 50)))
    assert [long.began(step, step) for step in (400, 401)] == [100, 401]


steps = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 200), st.sampled_from(["info", "warn", "act", "critical"])),
    max_size=30,
)


@given(steps, st.integers(0, 30), st.booleans())
def test_it_began_no_later_than_the_last_sign_and_resumes(
    gaps: list[tuple[int, int, Severity]], cut: int, closes: bool
) -> None:
    episode, step = Episode(), 0
    for i, (gap, back, severity) in enumerate(gaps):
        step += gap
        since = max(0, step - back)
        episode.note(sign(step, since=since, severity=severity, detector="slow-divergence"))
        assert episode.suspected_since(step) == since
        if severity in ("act", "critical"):
            assert episode.first_sign is not None
            assert episode.first_sign <= since
            assert not episode.calm(step)
        if i == cut:
            if closes:
                episode.close()
            saved = json.loads(json.dumps(episode.state_dict()))
            episode = Episode()
            episode.load_state_dict(saved)
            assert episode.state_dict() == saved


def test_sudden_is_nan_with_nothing_before_it() -> None:
    nan = [sign(step, severity="critical", detector="non-finite") for step in (100, 101, 102)]
    assert not Episode().sudden
    assert noted(*nan).sudden
    assert noted(sign(49, severity="warn"), *nan).sudden  # long ago
    assert noted(sign(90, severity="info"), *nan).sudden  # a note
    assert not noted(sign(50, severity="warn"), *nan).sudden
    assert not noted(*nan, sign(102)).sudden
    assert not noted(sign(100)).sudden
    again = noted(sign(90), *nan)
    again.close()
    again.note(nan[0])
    assert again.sudden


def test_sudden_survives_json() -> None:
    for episode in (noted(sign(90, severity="warn"), sign(100, severity="critical", detector="non-finite")), Episode()):
        other = Episode()
        other.load_state_dict(json.loads(json.dumps(episode.state_dict())))
        other.note(sign(100, severity="critical", detector="non-finite"))
        episode.note(sign(100, severity="critical", detector="non-finite"))
        assert other.sudden == episode.sudden


def test_what_is_not_a_number_foretells_nothing() -> None:
    """A loss that is NaN at once is the thing itself, whichever detector reports it first."""
    nan = sign(100, severity="critical", detector="non-finite")
    for value, sudden in ((math.nan, True), (math.inf, True), (9.0, False)):
        spike = Finding(detector="loss-spike", step=100, severity="warn", value=value, limit=1.0)
        assert noted((spike,), nan).sudden is sudden
    for detector in ("non-finite", "damaged-state"):
        assert noted(sign(99, severity="warn", detector=detector), nan).sudden


def test_a_budget_without_findings_notes_nothing() -> None:
    budget = Budget()
    budget.see(Diagnosis())
    assert budget.episode.state_dict() == Episode().state_dict()
