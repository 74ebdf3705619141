"""fp32 islands, scaler telemetry and underflow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.precision import Fp32Islands, Precision, underflow_share


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.seen["body"] = x.dtype
        x = self.head(self.norm(x))
        self.seen["head"] = x.dtype
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matching_modules_compute_in_fp32_and_the_others_do_not(dtype: torch.dtype) -> None:
    model = Net()
    with Fp32Islands(model, ["he*"]) as islands, torch.autocast("cpu", dtype=dtype):
        model(torch.randn(3, 4))
    assert islands.names == ["head"]
    assert model.seen == {"body": dtype, "head": torch.float32}
    with torch.autocast("cpu", dtype=dtype):
        model(torch.randn(3, 4))
    assert model.seen["head"] == dtype, "removed with the context"


def test_an_island_cures_a_forward_overflow() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight.fill_(3e4)
    x = torch.ones(2, 4) * 100
    with torch.autocast("cpu", dtype=torch.float16):
        assert not model(x).isfinite().all()
        with Fp32Islands(model, ["1"]):
            assert model(x).isfinite().all()


def test_an_exception_inside_an_island_leaves_autocast_as_it_was() -> None:
    model = Net()
    with Fp32Islands(model, ["head"]), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError):
            model.head(torch.randn(3, 5))
        assert torch.is_autocast_enabled("cpu")
        model(torch.randn(3, 4))
        assert model.seen == {"body": torch.bfloat16, "head": torch.float32}


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(steadystep.ConfigError, match="did you mean 'head'"):
        Fp32Islands(Net(), ["haed"])


def test_telemetry_tells_overflows_from_bad_losses() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": "fp16"}})
    x = torch.ones(2, 4)
    for factor in (0.01, 1e4, 0.01, math.nan):
        guard.step(lambda factor=factor: model(x).float().mean() * factor)
    report = guard.precision.report()
    assert (report.steps, report.overflows, report.bad_losses, report.scale) == (2, 1, 1, 32768.0)
    assert Precision("bf16").report() is None


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_share_counts_zeros_in_rows_that_have_a_gradient(rows: list[list[float]]) -> None:
    used = [row for row in rows if any(row)]
    zeros = sum(row.count(0.0) for row in used)
    expected = zeros / (3 * len(used)) if used else 1.0
    assert underflow_share([torch.tensor(rows)]).item() == pytest.approx(expected)


def test_fp16_without_a_scale_underflows_and_with_one_does_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    x = torch.randn(8, 32)
    shares = []
    for scale in (1.0, 65536.0):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean() * 3e-6
        (loss * scale).backward()
        shares.append(underflow_share([p.grad for p in model.parameters()]).item())
    assert shares[0] > 0.1 > shares[1]
