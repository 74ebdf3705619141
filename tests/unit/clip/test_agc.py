"""Adaptive clipping per unit: equal to its slow twin for every kind of layer, and bounded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadystep import ConfigError, UnsupportedError
from steadystep.clip import agc_
from tests.reference import clip_rules as twin

LAYERS = {
    "linear": lambda: nn.Linear(5, 3),
    "linear to one": lambda: nn.Linear(5, 1),
    "linear from one": lambda: nn.Linear(1, 5),
    "convolution": lambda: nn.Conv2d(3, 4, 3),
    "convolution 1-D": lambda: nn.Conv1d(3, 4, 3),
    "norm": lambda: nn.LayerNorm(6),
    "embedding": lambda: nn.Embedding(7, 3),
    "scalar": lambda: nn.ParameterList([nn.Parameter(torch.tensor(0.3))]),
    "empty": lambda: nn.ParameterList([nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))]),
}


def with_gradients(module: nn.Module, scale: float, seed: int = 0) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=rng).to(p.dtype)
        p.grad = (torch.randn(p.shape, generator=rng) * scale).to(p.dtype)
    return module


@pytest.mark.parametrize("kind", LAYERS)
@given(scale=st.floats(1e-4, 1e2), clip_factor=st.floats(1e-3, 1.0), eps=st.floats(1e-4, 10.0), seed=st.integers(0, 99))
def test_agc_is_its_twin_and_bounded(kind, scale, clip_factor, eps, seed) -> None:
    layer = with_gradients(LAYERS[kind](), scale, seed)
    before = [p.grad.clone() for p in layer.parameters()]
    report = agc_(layer.parameters(), clip_factor=clip_factor, eps=eps)
    changed = False
    for p, old in zip(layer.parameters(), before, strict=True):
        expected = twin.agc(p.detach(), old, clip_factor=clip_factor, eps=eps) if p.numel() else old
        torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-9)
        changed |= not torch.allclose(p.grad, old, rtol=1e-4, atol=0)
    norm = math.hypot(*(g.norm().item() for g in before))
    after = math.hypot(*(p.grad.norm().item() for p in layer.parameters()))
    assert report.finite
    assert report.norm_before == pytest.approx(norm, rel=1e-5)
    assert report.scale == pytest.approx(after / norm, rel=1e-5)
    assert report.clipped or not changed
    once = [p.grad.clone() for p in layer.parameters()]
    agc_(layer.parameters(), clip_factor=clip_factor, eps=eps)
    for p, old in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, old, rtol=1e-5, atol=0)


def net() -> nn.Module:
    model = nn.Sequential()
    model.body, model.head = nn.Linear(3, 4), nn.Linear(4, 2)
    return with_gradients(model, 100.0)


@pytest.mark.parametrize("way", ["parameters", "names", "pattern", "one name", "one parameter"])
def test_the_last_layer_can_be_left_alone(way: str) -> None:
    model = net()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    exclude = {
        "parameters": list(model.head.parameters()),
        "names": ["head.weight", "head.bias"],
        "pattern": ["head.*"],
        "one name": "head.*",
        "one parameter": model.head.weight,
    }[way]
    report = agc_(model.named_parameters(), exclude=exclude)
    assert torch.equal(model.head.weight.grad, before["head.weight"])
    assert torch.equal(model.head.bias.grad, before["head.bias"]) == (way != "one parameter")
    assert not torch.equal(model.body.weight.grad, before["body.weight"])
    assert report.norm_before == pytest.approx(math.hypot(*(g.norm().item() for g in before.values())), rel=1e-5)


def test_what_is_excluded_is_still_looked_at() -> None:
    model = net()
    model.head.bias.grad[0] = math.nan
    before = model.body.weight.grad.clone()
    report = agc_(model.named_parameters(), exclude="head.*")
    assert report.scale == 0.0
    assert not report.finite
    assert torch.equal(model.body.weight.grad, before)


def test_an_exclusion_that_matches_nothing_is_an_error() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"haed\.weight.*similar names: head\.weight"):
        agc_(model.named_parameters(), exclude=["haed.weight"])
    with pytest.raises(ConfigError, match="named_parameters"):
        agc_(model.parameters(), exclude=["head.weight"])
    with pytest.raises(ConfigError, match=r"shape \[7\]"):
        agc_(model.parameters(), exclude=[nn.Parameter(torch.zeros(7))])


@pytest.mark.parametrize("bad", [{"clip_factor": 0.0}, {"clip_factor": math.nan}, {"eps": 0.0}, {"eps": math.inf}])
def test_settings_that_mean_nothing(bad) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        agc_([], **bad)


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_rows_are_units(coalesced: bool) -> None:
    table = nn.Embedding(6, 3, sparse=True)
    table.weight.data = torch.arange(1.0, 19.0).reshape(6, 3)
    dense = torch.zeros(6, 3)
    dense[1], dense[4] = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([1e-4, 0.0, 0.0])
    if coalesced:
        indices, values = [[1, 4]], dense[[1, 4]]
    else:
        indices, values = [[1, 4, 1]], torch.stack([dense[1] * 0.5, dense[4], dense[1] * 0.5])
    grad = torch.sparse_coo_tensor(indices, values, (6, 3), check_invariants=True)
    table.weight.grad = grad.coalesce() if coalesced else grad
    report = agc_(table.parameters())
    expected = twin.agc(table.weight.detach(), dense, clip_factor=0.01, eps=1e-3)
    torch.testing.assert_close(table.weight.grad.to_dense(), expected)
    assert report.norm_before == pytest.approx(5.0)
    assert report.clipped


def test_elements_that_are_sparse_by_themselves_have_no_rows() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.sparse_coo_tensor([[0], [1]], [5.0], (3, 3), check_invariants=True)
    with pytest.raises(UnsupportedError, match="2 dimensions"):
        agc_([weight])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_single(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, 100, dtype=dtype))
    weight.grad = torch.full((2, 100), 6e4, dtype=dtype)
    report = agc_([weight])
    assert report.norm_before == pytest.approx(6e4 * math.sqrt(200), rel=1e-2)
    assert weight.grad[0].float().norm().item() == pytest.approx(0.1, rel=2e-2)


def test_a_unit_at_zero_may_still_move() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    agc_([weight])
    torch.testing.assert_close(weight.grad, torch.tensor([[0.6e-5, 0.8e-5], [0.0, 0.0]]))
