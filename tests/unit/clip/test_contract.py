"""What every clip promises, whatever its rule."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from steadystep import UnsupportedError, clip
from steadystep.clip import ClipReport, PercentileClip, TensorEMAClip, ZScoreClip

Clipper = Callable[[Any], ClipReport]

SHAPES = [(3, 4), (), (5,), (2, 3, 2), (0,), (1, 4)]
STATEFUL = {
    "z-score": lambda: ZScoreClip(warmup_steps=4, max_norm=3.0, restart_after_steps=3),
    "percentile": lambda: PercentileClip(percentile=60, history_steps=6),
    "tensor EMA": lambda: TensorEMAClip(warmup_steps=3),
}


def taught(make: Callable[[], Any]) -> Clipper:
    """A clip that has seen gradients of norm about 1."""
    clipper = make()
    for seed in range(5):
        clipper.clip_(parameters(0.15, seed))
    return clipper.clip_


CLIPPERS: dict[str, Callable[[], Clipper]] = {
    "global norm": lambda: lambda p: clip.clip_global_norm_(p, max_norm=1.0),
    "value": lambda: lambda p: clip.clip_value_(p, max_value=1.0),
    "per unit": lambda: lambda p: clip.agc_(p),
    "z-score": lambda: taught(STATEFUL["z-score"]),
    "percentile": lambda: taught(STATEFUL["percentile"]),
    "tensor EMA": lambda: taught(STATEFUL["tensor EMA"]),
}

every_clip = pytest.mark.parametrize("name", CLIPPERS)


def parameters(scale: float, seed: int = 0, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[Parameter]:
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i, shape in enumerate(SHAPES):
        dtype = dtypes[i % len(dtypes)]
        p = Parameter(torch.randn(shape, generator=rng).to(dtype))
        p.grad = (torch.randn(shape, generator=rng) * scale).to(dtype)
        made.append(p)
    return made


def gradients(params: list[Parameter]) -> list[Tensor]:
    return [p.grad.clone() for p in params]


def norm_of(params: list[Parameter]) -> float:
    return math.hypot(*(p.grad.double().norm().item() for p in params))


@every_clip
@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_the_report_says_what_happened(name: str, scale: float, seed: int) -> None:
    clipper, params = CLIPPERS[name](), parameters(scale, seed)
    before, norm = gradients(params), norm_of(params)
    report = clipper(params)
    assert report.finite
    assert 0.0 < report.scale <= 1.0
    assert report.norm_before == pytest.approx(norm, rel=1e-5)
    assert norm_of(params) <= norm * (1 + 1e-5)
    if name != "value":
        assert norm_of(params) == pytest.approx(norm * report.scale, rel=1e-4)
        assert report.clipped == (report.scale < 1.0)
    if not report.clipped:
        assert all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True))
    for old, p in zip(before, params, strict=True):
        assert (p.grad * old >= 0).all(), "no element may change its sign"
        assert (p.grad.abs() <= old.abs() * (1 + 1e-6)).all(), "no element may grow"


@every_clip
@given(tensor=st.sampled_from([0, 1, 2, 3, 5]), where=st.integers(0, 11), bad=st.sampled_from([math.nan, math.inf]))
def test_one_bad_element_anywhere_means_do_not_step(name: str, tensor: int, where: int, bad: float) -> None:
    clipper, params = CLIPPERS[name](), parameters(100.0)
    flat = params[tensor].grad.view(-1)
    flat[where % flat.numel()] = bad
    before = gradients(params)
    owner = getattr(clipper, "__self__", None)
    state = owner.state_dict() if owner else None
    report = clipper(params)
    assert (report.scale, report.clipped, report.finite) == (0.0, False, False)
    assert not math.isfinite(report.norm_before)
    for old, p in zip(before, params, strict=True):
        torch.testing.assert_close(old, p.grad, equal_nan=True, rtol=0, atol=0)
    assert owner is None or owner.state_dict() == state


@every_clip
def test_nothing_to_clip(name: str) -> None:
    clipper = CLIPPERS[name]()
    nothing = ClipReport(norm_before=0.0, scale=1.0, clipped=False, finite=True)
    assert clipper([]) == nothing
    assert clipper([Parameter(torch.ones(2))]) == nothing
    zero = Parameter(torch.ones(2))
    zero.grad = torch.zeros(2)
    assert clipper([zero]) == nothing
    assert torch.equal(zero.grad, torch.zeros(2))


@every_clip
def test_parameters_come_in_any_form(name: str) -> None:
    def forms(params: list[Parameter]) -> Iterator[Any]:
        yield params
        yield tuple(params)
        yield (p for p in params)
        yield dict(enumerate(params)).values()
        yield ((str(i), p) for i, p in enumerate(params))

    results = []
    for position in range(5):
        params = parameters(50.0)
        params.insert(2, Parameter(torch.zeros(3)))  # one without a gradient
        report = CLIPPERS[name]()(list(forms(params))[position])
        results.append((report, [p.grad for p in params if p.grad is not None]))
    for report, grads in results[1:]:
        assert report == results[0][0]
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0][1], strict=True))


@every_clip
def test_a_single_parameter_will_do(name: str) -> None:
    alone, listed = parameters(50.0)[0], parameters(50.0)[:1]
    assert CLIPPERS[name]()(alone) == CLIPPERS[name]()(listed)
    assert torch.equal(alone.grad, listed[0].grad)


@every_clip
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.bfloat16,), (torch.float16, torch.float32, torch.bfloat16)]
)
def test_dtypes_can_be_mixed(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    params = parameters(50.0, dtypes=dtypes)
    norm = norm_of(params)
    report = CLIPPERS[name]()(params)
    assert report.clipped
    assert report.norm_before == pytest.approx(norm, rel=1e-2 if name == "global norm" else 1e-3)
    if name != "value":
        assert norm_of(params) == pytest.approx(norm * report.scale, rel=1e-2)
    assert [p.grad.dtype for p in params] == [p.dtype for p in params]


@every_clip
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients_are_clipped_like_dense_ones(name: str, coalesced: bool) -> None:
    weight, dense = torch.ones(4, 2), torch.zeros(4, 2)
    dense[1], dense[3] = torch.tensor([6.0, 2.0]), torch.tensor([0.5, -8.0])
    rows = torch.sparse_coo_tensor(
        [[3, 1, 1]], torch.stack([dense[3], dense[1] / 2, dense[1] / 2]), (4, 2), check_invariants=True
    )
    a, b = Parameter(weight.clone()), Parameter(weight.clone())
    a.grad, b.grad = dense.clone(), rows.coalesce() if coalesced else rows
    others = [Parameter(torch.ones(3)) for _ in range(2)]
    for other in others:
        other.grad = torch.ones(3)
    first, second = CLIPPERS[name](), CLIPPERS[name]()
    report = first([a, others[0]])
    assert second([b, others[1]]) == report
    assert report.clipped
    assert b.grad.is_sparse
    torch.testing.assert_close(a.grad, b.grad.to_dense())
    assert torch.equal(others[0].grad, others[1].grad)


@every_clip
def test_gradients_with_a_graph_are_clipped_outside_it(name: str) -> None:
    weight = Parameter(torch.full((3,), 2.0))
    (weight.grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert weight.grad.requires_grad
    assert CLIPPERS[name]()([weight]).clipped
    assert weight.grad.max().item() < 12.0


def test_complex_gradients_have_a_norm_and_no_order() -> None:
    p = Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.tensor([3.0 + 4.0j, 0.0])
    assert clip.clip_global_norm_([p], max_norm=1.0).norm_before == 5.0
    with pytest.raises(UnsupportedError, match="complex"):
        clip.clip_value_([p], max_value=1.0)


def test_the_public_names() -> None:
    assert clip.__all__ == sorted(clip.__all__, key=lambda n: (n.islower(), n))
    assert all(getattr(clip, name).__doc__ for name in clip.__all__)
    assert all(">>>" in getattr(clip, name).__doc__ for name in clip.__all__)


def test_a_norm_beside_the_limit_is_torchs_decision() -> None:
    for nudge in torch.linspace(-3e-6, 3e-6, 121).tolist():
        ours, theirs = parameters(1.0), parameters(1.0)
        limit = norm_of(ours) * (1 + nudge)
        torch.nn.utils.clip_grad_norm_(theirs, limit)
        clip.clip_global_norm_(ours, max_norm=limit)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_an_infinite_limit_only_measures() -> None:
    params = parameters(1.0)
    before = gradients(params)
    report = clip.clip_global_norm_(params, max_norm=math.inf)
    assert report == ClipReport(norm_before=report.norm_before, scale=1.0, clipped=False, finite=True)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True))
