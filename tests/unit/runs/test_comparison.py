import json
import math
from pathlib import Path

import numpy as np
import pytest

from steadystep._utils.text import NOTHING
from steadystep.errors import ConfigError
from steadystep.pages.report import compare_page
from steadystep.runs.comparison import compare, curve_level, differing
from steadystep.runs.run import Series
from tests.unit.pages.report_runs import SETTINGS, made_run, steadystep, write_log


def noisy(value: float, sigma: float, *, points: int = 1000, seed: int = 0) -> Series:
    return Series(np.arange(points), value + np.random.default_rng(seed).normal(0, sigma, points))


def plain(name: str, loss: Series, **changes: object):  # type: ignore[no-untyped-def]
    return made_run(100, name=name, troubled=False, loss=loss, validation={}, **changes)


def test_the_noise_of_a_level_is_what_repeating_it_shows() -> None:
    found = [curve_level(noisy(2.0, 0.1, seed=seed)) for seed in range(200)]
    spread = float(np.std([one.value for one in found if one]))
    told = float(np.mean([one.noise for one in found if one and one.noise is not None]))
    assert told == pytest.approx(spread, rel=0.3)


def test_a_steady_fall_is_not_noise() -> None:
    falling = curve_level(Series(np.arange(1000), np.linspace(3, 2, 1000)))
    assert falling is not None
    assert falling.noise == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("points", [1, 2, 3, 4, 5, 30])
def test_few_points_give_a_level_and_perhaps_no_noise(points: int) -> None:
    found = curve_level(Series(np.arange(points), np.full(points, 2.0)))
    assert found is not None
    assert found.value == 2.0
    assert (found.noise is None) == (points < 5)


def test_a_diverged_end_has_no_level() -> None:
    values = np.r_[np.ones(90), np.full(10, np.nan)]
    found = curve_level(Series(np.arange(100), values))
    assert found is not None
    assert math.isnan(found.value)
    assert curve_level(Series()) is None


def test_a_clear_difference_is_told_with_its_size() -> None:
    result = compare([plain("a", noisy(2.0, 0.05)), plain("b", noisy(1.8, 0.05, seed=1))])
    assert result.better == "b"
    assert result.judged_by == "training loss"
    assert "b is better: training loss 1.79" in result.said
    assert "9.6 % lower" in result.said


def test_within_noise_there_is_no_clear_difference() -> None:
    told = [
        compare([plain("a", noisy(2.0, 0.2, seed=2 * seed)), plain("b", noisy(2.0, 0.2, seed=2 * seed + 1))]).better
        for seed in range(100)
    ]
    assert told.count(None) >= 85


def test_held_out_loss_counts_more_than_training_loss() -> None:
    a = made_run(name="a", troubled=False, validation={"val_loss": noisy(1.0, 0.01, points=30)})
    b = made_run(name="b", troubled=False, level=1.0, validation={"val_loss": noisy(1.5, 0.01, points=30)})
    result = compare([a, b])
    assert (result.better, result.judged_by) == ("a", "held-out loss")


def test_the_longer_run_is_judged_where_the_shorter_ends() -> None:
    falling = Series(np.arange(4000), np.linspace(4, 0, 4000))
    early = Series(np.arange(1000), np.linspace(4, 2.5, 1000))
    result = compare([plain("long", falling), plain("short", early)])
    assert result.better == "short"
    assert "up to step 999, the end of the shortest run" in result.said


def test_a_run_that_diverged_loses() -> None:
    lost = Series(np.arange(1000), np.full(1000, np.nan))
    result = compare([plain("a", lost), plain("b", noisy(2.0, 0.1))])
    assert result.better == "b"
    assert result.said == "b is the only run with a finite training loss. a ended without a finite training loss."
    both = compare([plain("a", lost), plain("b", lost)])
    assert both.better is None


def test_settings_that_differ() -> None:
    other = {**SETTINGS, "mode": "careful", "training": {**SETTINGS["training"], "seed": 3}}
    assert differing([SETTINGS, other]) == (
        ("mode", ("autopilot", "careful")),
        ("training.seed", ("\u2013", "3")),
    )
    assert differing([SETTINGS, SETTINGS]) == ()


def test_one_run_or_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least two runs"):
        compare([made_run(50)])
    with pytest.raises(ConfigError, match="none of these runs has a loss"):
        compare([plain("a", Series()), plain("b", Series())])


def test_two_runs_of_one_name_are_told_apart() -> None:
    result = compare([made_run(path=Path("x/run")), made_run(path=Path("y/run"), seed=1)])
    assert [one.name for one in result.runs] == ["x/run", "y/run"]


def test_the_page_escapes_names() -> None:
    page = compare_page([made_run(name="<script>alert(1)</script>"), made_run(name="b", seed=1)])
    assert page.count("<script") == 2
    assert "&lt;script&gt;alert(1)" in page


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, height in (("a", 2.0), ("b", 1.5)):
        write_log(tmp_path / name, made_run(600, level=height, troubled=False))
    monkeypatch.chdir(tmp_path)
    assert steadystep("compare", "a", "b", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["better"] == "b"
    assert [run["steps"] for run in told["runs"]] == [600, 600]
    assert steadystep("compare", "a", "b", "--out", "x.html") == 0
    shown = capsys.readouterr().out
    assert "b is better" in shown
    assert "best held-out loss" in shown
    assert Path("x.html").stat().st_size > 20_000
    assert steadystep("compare", "a") == 2
    assert "at least two runs" in capsys.readouterr().err


def test_a_log_without_settings_differs_in_none() -> None:
    known = [{"lr": 1e-3, "seed": 1}, {}, {"lr": 1e-2, "seed": 1}]
    assert differing(known) == (("lr", ("0.001", NOTHING, "0.01")),)
    assert differing(known[:2]) == ()


def test_losses_that_read_the_same_are_no_lead() -> None:
    runs = [plain(name, Series(np.arange(1), np.array([end]))) for name, end in (("a", 2.11903), ("b", 2.11904))]
    told = compare(runs)
    assert (told.better, told.said) == (None, "No difference: a and b have the same training loss, 2.119.")


def test_nothing_of_a_lost_run_counts_as_effective() -> None:
    ends = {"alive": 2.0, "lost": math.nan}
    told = compare([plain(name, Series(np.arange(100), np.full(100, end))) for name, end in ends.items()])
    assert [one.effective_share is None for one in told.runs] == [False, True]
