"""A batch of another scale must not leave its mark in running statistics, where neither loss nor gradient shows it."""

import math

import pytest
import torch
from torch import nn

import steadystep
from steadystep.detectors import BufferJump
from steadystep.records import Finding, Signals


def fed(peaks: list[float], *, detector: BufferJump | None = None) -> list[Finding]:
    detector = detector or BufferJump()
    rows = [
        Signals(step=step, loss=1.0, grad_norm=1.0, buffers=("norm.running_var",), buffer_peaks=(peak,))
        for step, peak in enumerate(peaks)
    ]
    return [finding for row in rows for finding in detector.update(row)]


def test_a_leap_is_told_with_the_buffer() -> None:
    (found,) = fed([1.0] * 40 + [2e3] + [1.0] * 40)
    assert (found.step, found.severity, found.where) == (40, "act", ("norm.running_var",))
    assert (found.value, found.limit, found.baseline) == (2e3, 1e3, 1.0)
    # the batch did it, or what wrote the buffer before the forward pass
    assert found.what == "after this forward pass norm.running_var is 2.0e+03 times larger than ever before"


def test_what_is_no_leap() -> None:
    for peaks in (
        [1.0] * 40 + [1e3] * 40,  # a thousand times is not more
        [1.0] * 31 + [1e5] * 40,  # at the beginning
        [1.0 * 1.5**i for i in range(100)],
        [0.0] * 100 + [5.0] * 100,
        [math.nan, math.inf] * 50 + [1.0],
        [],
    ):
        assert fed(peaks) == []


def test_a_scale_that_stays_is_the_new_one_and_single_leaps_do_not_add_up() -> None:
    assert [f.step for f in fed([1.0] * 40 + [1e4] * 50)] == [40, 41, 42]
    assert len(fed(([1.0] * 40 + [1e4]) * 6)) == 6


def test_a_batch_of_another_scale_leaves_no_mark_on_batchnorm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(60):
        x = torch.randn(16, 4)
        guard.step(lambda x=x: model(x).square().mean())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outcome = guard.step(lambda: model(torch.randn(16, 4) * 1e6).square().mean())
    assert not outcome.stepped
    assert outcome.diagnosis.cause == "bad-batch"
    assert outcome.findings[0].where == ("0.running_mean", "0.running_var")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert guard.step(lambda: model(torch.randn(16, 4)).square().mean()).stepped
    assert before["0.running_var"].max() == pytest.approx(1.0, abs=0.5)
