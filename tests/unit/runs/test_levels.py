"""How far a curve strays."""

import numpy as np
import pytest

from steadystep.runs.levels import FEWEST, WINDOW, bend_noise, noise, spread, trailing_median


@pytest.mark.parametrize("sigma", [0.1, 3.0])
def test_each_estimator_finds_the_sigma_of_normal_noise(sigma: float) -> None:
    values = np.random.default_rng(0).normal(2.0, sigma, 20_000)
    assert spread(values, 2.0) == pytest.approx(sigma, rel=0.02)
    assert noise(values) == pytest.approx(sigma, rel=0.02)
    assert bend_noise(values) == pytest.approx(sigma, rel=0.02)


def test_what_each_does_not_feel() -> None:
    values = np.random.default_rng(0).normal(0.0, 1.0, 20_000)
    outliers = np.where(np.arange(len(values)) % 50 == 0, 1e6, values)
    assert spread(outliers, 0.0) == pytest.approx(1.0, rel=0.05)
    assert bend_noise(values + 5.0 * np.arange(len(values))) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("count", [3, FEWEST, FEWEST + 1, WINDOW, WINDOW + 1, 79])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e300])
def test_the_median_of_the_first_points_is_numpys(count: int, scale: float) -> None:
    values = scale * np.random.default_rng(count).normal(0.0, 1.0, count).round(1)  # with equal ones among them
    wanted = [np.quantile(values[max(0, i - WINDOW) : i], 0.5) if i >= FEWEST else np.nan for i in range(count)]
    assert np.array_equal(trailing_median(values), wanted, equal_nan=True)
