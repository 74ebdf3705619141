"""One story: which of what a run showed and what experiments showed is believed, and in which order."""

import pytest

from steadystep import Diagnosis
from steadystep.engine.experiments import credible, one_story


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
        (["zero-gradient:frozen-parameters"], ["healthy"], ["healthy"]),
        # what is concluded where nothing else explains it stays behind what the run showed
        (["dead-units"], ["no-learning:labels-shuffled"], ["dead-units", "no-learning:labels-shuffled"]),
        # a loss that is no number is not explained by what cannot break it
        (["non-finite-loss"], ["batch-size-unfit"], ["non-finite-loss", "batch-size-unfit"]),
        (["non-finite-loss"], ["learning-rate-too-high"], ["learning-rate-too-high", "non-finite-loss"]),
        # what learning does not refute
        (["learning-rate-too-high"], ["healthy"], ["learning-rate-too-high"]),
        # experiments come before guesses from curves
        (["dead-units"], ["no-learning:wrong-loss"], ["no-learning:wrong-loss", "dead-units"]),
        (["healthy"], ["learning-rate-too-low"], ["learning-rate-too-low"]),
        # what large steps have left of the units
        (["learning-rate-too-high"], ["saturation"], ["learning-rate-too-high", "saturation"]),
        # both name the same first: what else was seen stays behind a comparison
        (["dead-units", "no-learning:wrong-loss"], ["dead-units"], ["dead-units", "no-learning:wrong-loss"]),
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


def test_no_experiment_refutes_what_was_seen_as_it_is() -> None:
    frozen = ("zero-gradient", "frozen-parameters")
    assert list(one_story(of("zero-gradient:frozen-parameters"), of("healthy"), {frozen})) == of(":".join(frozen))
    told = one_story(of("zero-gradient:frozen-parameters"), of("learning-rate-too-low"), {frozen})
    assert [diagnosis.cause for diagnosis in told] == ["zero-gradient", "learning-rate-too-low"]
    told = one_story(of("unscaled-data"), of("clipping-too-tight", "unscaled-data"), {("unscaled-data", "")})
    assert [diagnosis.cause for diagnosis in told] == ["unscaled-data", "clipping-too-tight"]


UNJUDGED = Diagnosis(evidence="no sign of trouble, learning not judged: the loss of a policy says little")
INDEPENDENT = Diagnosis(cause="no-learning", fault="output-independent-of-input")
TWICE = Diagnosis(cause="no-learning", fault="wrong-loss")
UNTRAINED = Diagnosis(cause="zero-gradient")
SLOW = Diagnosis(cause="learning-rate-too-low")


@pytest.mark.parametrize(
    ("seen", "learned", "kept"),
    [
        (UNJUDGED, False, [TWICE, UNTRAINED]),
        (Diagnosis(), True, [TWICE, UNTRAINED]),
        (Diagnosis(), False, [INDEPENDENT, TWICE, UNTRAINED, SLOW]),
        (SLOW, True, [INDEPENDENT, TWICE, UNTRAINED, SLOW]),
    ],
)
def test_a_run_that_learns_is_not_talked_ill(seen: Diagnosis, learned: bool, kept: list[Diagnosis]) -> None:
    assert list(credible(seen, [INDEPENDENT, TWICE, UNTRAINED, SLOW], learned=learned)) == kept
    assert list(credible(UNJUDGED, [SLOW], learned=learned)) == [UNJUDGED]


def test_trials_that_learn_nothing_do_not_refute_a_run_that_has_shown_a_fall() -> None:
    """A task that is mostly noise: forty updates show nothing of what three hundred did."""
    vague = Diagnosis(cause="no-learning", evidence="no trial learned")
    fell = Diagnosis(evidence="300 updates, loss 89 at the start, 82 now")
    assert list(credible(fell, [vague], learned=False)) == [fell]
    assert list(credible(UNJUDGED, [vague], learned=False, known=True)) == [vague]
