"""Batches of another scale, and the same batch again: from one number per batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steadystep
from steadystep.detectors import InputScale, SameBatch
from steadystep.records import Finding, Signals
from steadystep.signals.batches import batch_rms


def fed(detector: InputScale | SameBatch, sizes: list[float | None]) -> list[Finding]:
    rows = [Signals(step=i, loss=1.0, grad_norm=1.0, batch_rms=size) for i, size in enumerate(sizes)]
    return [finding for row in rows for finding in detector.update(row)]


class Batch(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.full((4, 3), -2.0), 2.0),
        ((torch.tensor([1, 2, 3]), torch.full((2,), 3.0)), 3.0),  # real numbers count first
        ({"ids": torch.tensor([[3, 4]])}, math.log1p(math.sqrt(12.5))),  # ids have no scale
        (torch.full((2, 2), 200, dtype=torch.uint8), 200.0),
        (Batch(mask=torch.ones(2, dtype=torch.bool), x=[torch.tensor([6.0])]), 6.0),
        (torch.full((9,), 6e4, dtype=torch.float16), 6e4),
        ("text", None),
        (torch.zeros(0, 3), None),
        (None, None),
    ],
)
def test_what_is_measured(batch: Any, expected: float | None) -> None:
    found = batch_rms(batch)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert float(found) == pytest.approx(expected, rel=1e-3)


def test_a_large_batch_is_sampled() -> None:
    x = torch.randn(3, 512, 512)
    assert float(batch_rms(x)) == pytest.approx(float(x.square().mean().sqrt()), rel=0.02)
    assert float(batch_rms(x.transpose(0, 2))) == pytest.approx(1.0, rel=0.05)


class TestInputScale:
    def test_a_batch_a_thousand_times_as_large_is_refused(self) -> None:
        (found,) = fed(InputScale(), [1.0] * 40 + [1001.0] + [1.0] * 5)
        assert (found.step, found.severity, found.baseline) == (40, "act", 1.0)

    def test_what_is_no_other_scale(self) -> None:
        assert fed(InputScale(), [1.0] * 40 + [999.0]) == []
        assert fed(InputScale(), [1.0] * 31 + [1e9]) == []
        assert fed(InputScale(), [0.0] * 100 + [1e9]) == []
        assert fed(InputScale(), [1.0] * 40 + [None, math.nan]) == []
        assert fed(InputScale(), [1.0] * 20 + [math.inf] + [1.0] * 20 + [999.0]) == []

    def test_one_too_large_to_be_squared(self) -> None:
        detector = InputScale()
        assert [f.step for f in fed(detector, [1.0] * 40 + [math.inf, 1.0])] == [40]
        assert detector.state_dict()["largest"] == 1.0

    def test_a_scale_that_stays_is_the_new_one(self) -> None:
        assert [f.step for f in fed(InputScale(), [1.0] * 40 + [1e4] * 9)] == [40, 41, 42]

    def test_tanh_hides_it_and_it_is_refused_all_the_same(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        for step in range(60):
            x = torch.randn(16, 4) * (1e6 if step == 50 else 1.0)
            outcome = guard.step(lambda x: (model(x) - 1.0).square().mean(), batch=x)
            assert outcome.stepped == (step != 50)
            if step == 50:
                assert outcome.diagnosis.cause == "bad-batch"
                assert outcome.plan.actions == ("skip-step",)


class TestSameBatch:
    def test_the_fourth_in_a_row_is_told_once(self) -> None:
        sizes = [1.0 + 0.01 * i for i in range(80)]
        (found,) = fed(SameBatch(), [*sizes, *[7.0] * 30])
        assert (found.step, found.severity, found.since) == (83, "warn", 80)

    @given(st.integers(2, 5), st.integers(1, 40))
    def test_data_that_repeats_by_design_is_never_mentioned(self, times: int, length: int) -> None:
        """An epoch of one batch, data that is used several times in a row, or whole epochs that repeat."""
        echoed = [float(i) for i in range(60) for _ in range(times)]
        assert fed(SameBatch(), echoed) == []
        assert fed(SameBatch(), [1.0] * 200) == []
        if length > 1:
            assert fed(SameBatch(), [float(i) for i in range(length)] * 20) == []

    def test_without_a_batch_nothing_is_known(self) -> None:
        assert fed(SameBatch(), [None] * 200) == []

    def test_a_stuck_loader_is_named(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        data = [torch.randn(16, 4) for _ in range(71)]
        said = [guard.step(lambda x: model(x).square().mean(), batch=x).diagnosis.cause for x in data + data[-1:] * 30]
        assert [step for step, cause in enumerate(said) if cause == "repeated-batch"] == [73]
        assert "repeated-batch" in [diagnosis.cause for diagnosis in guard.diagnose()]
