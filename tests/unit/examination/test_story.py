"""One story: which of what a run showed and what experiments showed is believed, and in which order."""

import pytest

from steadystep import Diagnosis
from steadystep.diagnosis.conclusion import one_story


def of(*names: str) -> list[Diagnosis]:
    """Diagnoses from "cause" or "cause:fault"."""
    return [Diagnosis(cause=name.partition(":")[0], fault=name.partition(":")[2]) for name in names]


@pytest.mark.parametrize(
    ("seen", "tried", "told"),
    [
        # both agree that nothing is wrong
        (["healthy"], ["healthy"], ["healthy"]),
        ([], ["healthy"], ["healthy"]),
        # mistakes of the loop: trials take their own steps, so they neither confirm nor refute them
        (["missing-zero-grad"], ["healthy"], ["missing-zero-grad"]),
        (["missing-zero-grad"], ["learning-rate-too-high"], ["missing-zero-grad", "learning-rate-too-high"]),
        (["schedule-error"], ["no-learning:wrong-loss"], ["schedule-error", "no-learning:wrong-loss"]),
        (["lost-moments"], ["healthy"], ["lost-moments"]),
        (["flat-reward"], ["healthy"], ["flat-reward"]),
        # what a run that learns does not have
        (["no-learning"], ["healthy"], ["healthy"]),
        (["learning-rate-too-low"], ["healthy"], ["healthy"]),
        (["dead-units", "unscaled-data"], ["healthy"], ["healthy"]),
        (["no-learning", "missing-zero-grad"], ["healthy"], ["missing-zero-grad"]),
        # unless the run named a particular mistake
        (["zero-gradient:frozen-parameters"], ["healthy"], ["zero-gradient:frozen-parameters"]),
        # what learning does not refute
        (["learning-rate-too-high"], ["healthy"], ["learning-rate-too-high"]),
        # experiments come before guesses from curves
        (["dead-units"], ["no-learning:wrong-loss"], ["no-learning:wrong-loss", "dead-units"]),
        (["healthy"], ["learning-rate-too-low"], ["learning-rate-too-low"]),
        # a mistake of the loop that the run itself did not find likeliest stays behind
        (
            ["oscillation", "missing-zero-grad"],
            ["learning-rate-too-high"],
            ["learning-rate-too-high", "oscillation", "missing-zero-grad"],
        ),
        # the same is not told twice
        (["learning-rate-too-low"], ["learning-rate-too-low"], ["learning-rate-too-low"]),
        (
            ["no-learning", "no-learning:wrong-loss"],
            ["no-learning:wrong-loss"],
            ["no-learning:wrong-loss", "no-learning"],
        ),
    ],
)
def test_which_is_believed(seen: list[str], tried: list[str], told: list[str]) -> None:
    assert list(one_story(of(*seen), of(*tried))) == of(*told)


def test_the_evidence_of_the_experiment_stays() -> None:
    tried = Diagnosis(cause="learning-rate-too-low", evidence="tried")
    (found,) = one_story([Diagnosis(cause="learning-rate-too-low", evidence="seen")], [tried])
    assert found is tried
