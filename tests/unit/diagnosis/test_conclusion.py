"""What is said of a run that nothing speaks against."""

from typing import Any

import pytest

from steadystep.diagnosis import conclusion
from steadystep.diagnosis.conclusion import conclude_from_curve
from steadystep.diagnosis.facts import Facts
from steadystep.diagnosis.learning import TOO_SHORT, Progress
from tests.unit.diagnosis.made import curve, facts, finding, tally

STANDS = Progress(start=2.0, end=2.0, error=0.001, end_error=0.001, settled=True)
FELL = Progress(start=2.0, end=1.0, error=0.01, end_error=0.01, settled=True)
BEATS = Progress(start=1.0, end=1.0, error=0.5, end_error=0.01, settled=True, base=1.5, base_text="the variance")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Concludes from what the test says about learning."""

    def conclude(
        about: Facts, found: Progress | None, *, supervised: bool = True, worse: bool = False, live: bool = False
    ) -> tuple[str, str]:
        monkeypatch.setattr(conclusion, "progress", lambda facts: found)
        monkeypatch.setattr(conclusion, "supervised", lambda facts: supervised)
        monkeypatch.setattr(conclusion, "worse_than_constant", lambda facts: STANDS if worse else None)
        diagnosis = conclude_from_curve(about, live=live)
        return diagnosis.cause, diagnosis.evidence

    return conclude


def of(losses: int = 256, **more: Any) -> Facts:
    return facts((2.0,) * losses, **{"ratios": (1e-3,)} | more)


def test_too_short(said: Any) -> None:
    assert said(of(TOO_SHORT - 1, curve=curve()), STANDS) == (
        "healthy",
        f"too short to tell: nothing found in {TOO_SHORT - 1} updates",
    )
    assert said(of(curve=None), STANDS)[1].startswith("too short")
    assert not said(of(TOO_SHORT, curve=curve()), STANDS)[1].startswith("too short")


def test_while_it_runs_there_are_only_numbers(said: Any) -> None:
    cause, evidence = said(of(), STANDS, live=True)
    assert cause == "healthy"
    assert evidence == (
        "256 updates, loss 2 at the start, 2 now, an update changes the weights by 1.0e-03 of their size"
    )
    assert "weights" not in said(of(ratios=()), STANDS, live=True)[1]


def test_a_loss_that_stands_still(said: Any) -> None:
    cause, evidence = said(of(), STANDS)
    assert cause == "no-learning"
    assert evidence.startswith("not learning, cause unknown: in 256 updates the loss went from 2 to 2; an update")
    assert said(of(200), STANDS)[0] == "no-learning"
    assert said(of(199, curve=curve()), STANDS)[0] == "healthy"
    assert said(of(), STANDS, supervised=False)[0] == "healthy"
    assert said(of(ratios=(3.01e-4,)), STANDS)[0] == "no-learning"
    assert said(of(ratios=(2.99e-4,)), STANDS)[0] == "healthy"  # updates too small to tell
    assert said(of(ratios=()), STANDS)[0] == "healthy"
    assert said(of(ratios=()), STANDS, worse=True)[0] == "no-learning"
    assert said(of(), FELL)[0] == "healthy"


def test_learning_that_cannot_be_judged(said: Any) -> None:
    unknown = said(of(ratios=()), STANDS, supervised=False)[1]
    assert unknown.startswith(f"{conclusion.NOT_JUDGED}: the loss has not fallen, and what it measures is unknown; 256")
    assert said(of(ratios=()), STANDS)[1].startswith(f"{conclusion.NOT_JUDGED}: the loss has not fallen; 256 updates")
    assert said(of(), None)[1].startswith(conclusion.NOT_JUDGED)
    assert "another network" in said(of(opposed=True), FELL)[1]
    below = facts((*(1.0,) * 128, *(-1.0,) * 128))
    assert "below zero" in said(below, FELL)[1]


def test_learning(said: Any) -> None:
    fell = curve(best=1.0, late=1.0, lowest=1.0)
    plain = "256 updates, loss 2 at the start, 1 now, an update changes the weights by 1.0e-03 of their size"
    assert said(of(curve=fell), FELL) == ("healthy", plain)
    assert said(of(curve=fell), BEATS) == ("healthy", f"{plain}; the variance is 1.5")
    worse = said(of(curve=curve(best=1.0, late=1.5, lowest=1.0)), FELL)[1]
    assert worse.startswith("no cause found, but the loss was 1 at best: 256 updates")


@pytest.mark.parametrize(("worst", "is_told"), [(0.95, True), (0.94, False)])
def test_nearly_all_gradients_clipped(said: Any, worst: float, is_told: bool) -> None:
    noted = {"clip-rate": tally(finding("clip-rate", "info", value=worst))}
    about = of(curve=curve(best=1.0, late=1.0), noted=noted)
    assert ("something about clip-rate" in said(about, FELL)[1]) is is_told
    assert bool(conclude_from_curve(about).advice) is is_told
