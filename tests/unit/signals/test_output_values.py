"""Numbers of outputs and inputs, against the same in numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steadystep.signals import batches
from steadystep.signals.batches import faintest, size_of_inputs, spread_of, values_of

X = torch.tensor([[3.0, 4.0], [0.0, 0.0]])  # of mean square 6.25


def twin(x: Any) -> list[float]:
    """Smallest, largest, RMS, spread, errors of sums over rows and columns, entropy, alignment, distinct rows."""
    rms = np.sqrt((x**2).mean())
    if x.ndim < 2:
        return [x.min(), x.max(), rms, x.std() if len(x) > 1 else math.nan, *[math.nan] * 5]
    spread = np.sqrt(x.var(0).mean()) if len(x) > 1 else math.nan
    errors = [np.abs(x.sum(dim) - 1.0).max() for dim in (-1, 0)]
    entropy = alignment = math.nan
    if x.shape[-1] > 1:
        shares = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        entropy = -(shares * np.log(shares)).sum(-1).mean()
        rows = x.reshape(-1, x.shape[-1])
        alignment = np.linalg.norm((rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(0))
    apart = [np.abs(x[i] - x[i - 1]).max() > 1e-6 * rms for i in range(len(x))]
    return [x.min(), x.max(), rms, spread, *errors, entropy, alignment, np.mean(apart)]


@pytest.mark.parametrize("shape", [(5,), (1,), (4, 3), (1, 3), (4, 1), (3, 2, 4), (3, 4, 2, 2)])
@given(scale=st.sampled_from([1e-3, 1.0, 5.0]), twice=st.booleans(), seed=st.integers(0, 99))
def test_values_are_those_of_numpy(shape: tuple[int, ...], scale: float, twice: bool, seed: int) -> None:
    values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if twice:
        values[-1] = values[0]
    found = [number.item() for number in values_of(values)]
    assert found == pytest.approx([float(each) for each in twin(values.double().numpy())], rel=1e-3, nan_ok=True)


def size(given: Any) -> float:
    return size_of_inputs(given).item()


class TestSizeOfInputs:
    def test_the_largest_mean_square_counts(self) -> None:
        assert size([X]) == 6.25
        assert size([X, 2.0 * X]) == size([2.0 * X, X]) == 25.0
        assert size([X, 2.0 * X, 0.5 * X]) == 25.0
        assert size([{"x": X.half()}]) == 6.25

    @pytest.mark.parametrize(
        "other", [torch.full((2, 2), 9), torch.tensor(9.0), torch.ones(0, 2), torch.full((9,), 9.0), "text"]
    )
    def test_what_has_no_size(self, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batches, "MOST", 8)
        assert math.isnan(size([other]))
        assert size([X, other]) == 6.25
        assert size([torch.full((8,), 2.0)]) == 4.0  # as many as may be

    def test_eight_parts_are_opened(self) -> None:
        assert size([0] * 5 + [X]) == 6.25
        assert math.isnan(size([0] * 20 + [X]))


def test_of_large_values_the_first_rows_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[0.0, 0.0], [2.0, 4.0], [50.0, 90.0]])
    whole = spread_of(rows).item()
    monkeypatch.setattr(batches, "MOST", 4)
    assert spread_of(rows).item() == pytest.approx(math.sqrt(2.5)) != whole
    monkeypatch.setattr(batches, "MOST", 1)
    assert spread_of(rows).item() == pytest.approx(math.sqrt(2.5)), "two rows at least"
    assert spread_of(rows.long()).item() == pytest.approx(math.sqrt(2.5))


def test_of_further_outputs_the_faintest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    main, loud = torch.randn(2, 2), torch.tensor([[1.0], [-1.0]])
    faint: Tensor = torch.tensor([[9.0, 9.0], [11.0, 11.0]])
    expected = pytest.approx(1.0 / math.sqrt(101.0))
    assert faintest((main, loud, faint), main).item() == faintest((main, faint, loud), main).item() == expected
    assert faintest((main, loud), main).item() == pytest.approx(1.0)
    assert faintest((main, torch.zeros(2, 3)), main).item() == 0.0
    monkeypatch.setattr(batches, "MOST", 2)
    assert faintest((main, loud, faint), main).item() == pytest.approx(1.0)
