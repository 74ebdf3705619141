"""Which signs of trouble belong together, and when the present one began."""

import json

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
    plan = Plan(steps=("rollback",), to=40)
    budget.count(Outcome(step=100, reading=1.0, stepped=False, plan=plan))
    assert budget.episode.first_sign == 100
    budget.count(Outcome(step=101, reading=1.0, stepped=False, plan=plan, restored=41))
    assert budget.episode.first_sign is None


def test_a_suspicion_lasts_for_fifty_steps_and_needs_no_severity() -> None:
    episode = noted(sign(100, severity="info", detector="slow-divergence", since=70))
    assert episode.first_sign is None
    assert [episode.suspected_since(step) for step in (100, 150, 151)] == [70, 70, None]
    assert noted(sign(100, severity="info", detector="loss-spike", since=70)).suspected_since(100) is None


class TestTwice:
    def confirmed(
        self, episode: Episode, step: int, *, said: Severity = "warn", detector: str = "slow-divergence"
    ) -> str:
        (found,) = episode.twice(sign(step, detector=detector, severity=said), sign(step, detector=detector))
        return found.severity

    def test_a_creeping_loss_must_be_confirmed_on_a_second_batch(self) -> None:
        episode = Episode()
        assert [self.confirmed(episode, step) for step in (100, 150, 201, 250)] == ["warn", "act", "warn", "act"]

    def test_one_batch_makes_no_warning_of_a_suspicion_and_two_do_more(self) -> None:
        episode = Episode()
        assert [self.confirmed(episode, step, said="info") for step in (100, 150)] == ["info", "act"]

    def test_one_batch_is_no_reason_to_act(self) -> None:
        assert self.confirmed(Episode(), 100, said="act") == "warn"

    def test_others_and_what_was_not_confirmed_are_left_alone(self) -> None:
        episode = Episode()
        assert self.confirmed(episode, 100, detector="not-healing") == "act"
        note = sign(100, detector="slow-divergence", severity="info")
        assert episode.twice(sign(100, detector="slow-divergence", severity="warn"), note) == note
        assert self.confirmed(episode, 101) == "warn"

    def test_a_rollback_begins_anew_and_a_resume_does_not(self) -> None:
        episode = Episode()
        self.confirmed(episode, 100)
        twin = Episode()
        twin.load_state_dict(json.loads(json.dumps(episode.state_dict())))
        assert self.confirmed(twin, 110) == "act"
        episode.close()
        assert self.confirmed(episode, 110) == "warn"


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
