"""Attention and MLP against plain twins, and what each option promises."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.layers import StableAttention, StableMLP, peak_logits, qk_clip_


def reference(attention: StableAttention, x: Tensor, *, mask=None, cap=None, scales=None) -> Tensor:
    """Attention as in the paper, one head at a time, in loops."""
    time, d_head = x.shape[1], attention.d_model // attention.n_heads
    q, k, v = (layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    heads = []
    for h in range(attention.n_heads):
        part = slice(h * d_head, (h + 1) * d_head)
        qh, kh = q[..., part], k[..., part]
        if attention.q_norm is not None:
            qh = qh / qh.square().mean(-1, keepdim=True).sqrt() * attention.q_norm.weight
            kh = kh / kh.square().mean(-1, keepdim=True).sqrt() * attention.k_norm.weight
        logits = qh @ kh.transpose(1, 2) / math.sqrt(d_head)
        if scales is not None:
            logits = logits * scales[h]
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        allowed = torch.ones(time, time, dtype=torch.bool)
        if attention.causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask[:, 0]
        weights = logits.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0.0)
        heads.append(weights @ v[..., part])
    return attention.out_proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_plain_thing_and_each_option_is_what_it_says(cap, qk_norm, causal, masked) -> None:
    attention = StableAttention(12, 3, qk_norm=qk_norm, logit_cap=cap, causal=causal)
    for p in attention.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    x = torch.randn(2, 5, 12)
    mask = torch.rand(2, 1, 5, 5) < 0.7 if masked else None
    if masked:
        mask[0, 0, 2] = False  # a position that may see nothing
    out = attention(x, mask=mask)
    expected = reference(attention, x, mask=mask, cap=cap)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    names = [n for n, _ in attention.named_parameters()]
    gradients = torch.autograd.grad(out.square().sum(), attention.parameters())
    twins = torch.autograd.grad(reference(attention, x, mask=mask, cap=cap).square().sum(), attention.parameters())
    if not masked:  # the reference's nan_to_num has NaN gradients there
        for name, a, b in zip(names, gradients, twins, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("causal", [False, True])
def test_with_the_options_off_it_is_nn_multihead_attention(causal: bool) -> None:
    attention = StableAttention(12, 3, qk_norm=False, causal=causal)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    theirs.in_proj_weight.data.copy_(torch.cat([p.weight for p in parts]))
    theirs.in_proj_bias.data.copy_(torch.cat([p.bias for p in parts]))
    theirs.out_proj.load_state_dict(attention.out_proj.state_dict())
    x = torch.randn(2, 5, 12)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    torch.testing.assert_close(attention(x), theirs(x, x, x, attn_mask=mask, need_weights=False)[0])


@given(scale=st.floats(1.0, 1e4), seed=st.integers(0, 99))
def test_qk_norm_bounds_the_logits_whatever_the_weights(scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    attention = StableAttention(16, 4)
    attention.q_proj.weight.data.mul_(scale)
    attention.k_proj.weight.data.mul_(scale)
    peaks = peak_logits(attention, scale * torch.randn(2, 6, 16))
    assert (peaks <= math.sqrt(4) * (1 + 1e-4)).all()


@given(scale=st.floats(1.0, 1e6), cap=st.floats(1.0, 100.0), seed=st.integers(0, 99))
def test_the_cap_bounds_the_ratio_of_attention_weights(scale: float, cap: float, seed: int) -> None:
    torch.manual_seed(seed)
    attention = StableAttention(8, 2, qk_norm=False, logit_cap=cap)
    x = scale * torch.randn(1, 4, 8)
    out = attention(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


def test_a_zero_output_starts_as_nothing_and_can_learn() -> None:
    for block in (StableAttention(8, 2, zero_init_output=True), StableMLP(8, 16, zero_init_output=True)):
        out = block(torch.randn(2, 3, 8))
        assert not out.any()
        (out - 1).square().sum().backward()
        last = block.out_proj if isinstance(block, StableAttention) else block.fc2
        assert last.weight.grad.any()


def test_dropout_only_in_training() -> None:
    x = torch.randn(2, 6, 8)
    for options in ({}, {"logit_cap": 5.0}):
        attention = StableAttention(8, 2, dropout=0.5, **options)
        assert not torch.equal(attention(x), attention(x))
        attention.eval()
        torch.testing.assert_close(attention(x), reference(attention, x, cap=options.get("logit_cap")))
    mlp = StableMLP(8, 64, dropout=0.5)
    assert not torch.equal(mlp(x), mlp(x))
    assert torch.equal(mlp.eval()(x), mlp(x))


@pytest.mark.parametrize("options", [{}, {"qk_norm": False}, {"logit_cap": 5.0}])
def test_it_runs_under_autocast(options: dict) -> None:
    attention = StableAttention(8, 2, causal=True, **options)
    x = torch.randn(2, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(x)
        out.float().square().sum().backward()
    torch.testing.assert_close(out.float(), attention(x), atol=0.1, rtol=0.1)


def test_the_mlp_is_two_linear_layers_with_gelu() -> None:
    mlp = StableMLP(8, 32)
    x = torch.randn(3, 8)
    expected = nn.functional.gelu(x @ mlp.fc1.weight.T + mlp.fc1.bias) @ mlp.fc2.weight.T + mlp.fc2.bias
    torch.testing.assert_close(mlp(x), expected)
    assert StableMLP(8, 32, bias=False).fc1.bias is None


@pytest.mark.parametrize(
    ("method", "stds"),
    [
        ("xavier", (math.sqrt(2 / 320), math.sqrt(2 / 320))),
        ("kaiming", (math.sqrt(2 / 64), math.sqrt(2 / 256))),
        ("small", (0.02, 0.02)),
    ],
)
def test_first_weights(method: str, stds: tuple[float, float]) -> None:
    mlp = StableMLP(64, 256, init_method=method)
    for layer, std in zip((mlp.fc1, mlp.fc2), stds, strict=True):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
        assert not layer.bias.any()
    attention = StableAttention(64, 4, init_method=method)
    expected = {"xavier": math.sqrt(1 / 64), "kaiming": math.sqrt(2 / 64), "small": 0.02}[method]
    assert attention.q_proj.weight.std().item() == pytest.approx(expected, rel=0.05)
    attention.q_norm.weight.data.fill_(3.0)
    attention.reset_parameters()
    assert attention.q_norm.weight.eq(1).all()


def spread(attention: nn.Module) -> None:
    for p in attention.parameters():
        p.data.add_(0.5 * torch.randn_like(p))


@given(limit=st.floats(0.01, 20.0), seed=st.integers(0, 99))
def test_qk_clip_changes_the_logits_by_one_factor_per_head_and_nothing_else(limit: float, seed: int) -> None:
    torch.manual_seed(seed)
    attention = StableAttention(12, 3, qk_norm=False, causal=True, record_peaks=True)
    spread(attention)
    x = torch.randn(2, 5, 12)
    attention(x)
    attention(0.1 * x)
    torch.testing.assert_close(
        attention.peaks, torch.maximum(peak_logits(attention, x), peak_logits(attention, 0.1 * x))
    )
    before = peak_logits(attention, x)
    report_expected = [limit / p if p > limit else 1.0 for p in attention.peaks.tolist()]
    expected = reference(attention, x, scales=report_expected)
    report = qk_clip_(attention, limit)
    assert report.scales == pytest.approx(report_expected, rel=1e-5)
    assert report.clipped == any(s < 1 for s in report_expected)
    torch.testing.assert_close(attention(x), expected, rtol=1e-3, atol=1e-5)
    after = peak_logits(attention, x)
    assert (after <= torch.maximum(before.clamp(max=limit), torch.full((3,), limit)) * (1 + 1e-4)).all()
    assert not qk_clip_(attention, limit * 1.001, peaks=after).clipped  # a second time there is nothing left to do


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 4, "vdim": 6}, {"add_bias_kv": True}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_qk_clip_on_torchs_attention(options: dict, batch_first: bool) -> None:
    attention = nn.MultiheadAttention(12, 3, batch_first=batch_first, **options)
    spread(attention)
    query = torch.randn(2, 5, 12)
    key, value = torch.randn(2, 4, options.get("kdim", 12)), torch.randn(2, 4, options.get("vdim", 12))
    if not batch_first:
        query, key, value = (t.transpose(0, 1).contiguous() for t in (query, key, value))
    peaks = peak_logits(attention, query, key)
    other = attention.v_proj_weight if "vdim" in options else attention.in_proj_weight[24:]
    kept = other.detach().clone()
    weights = attention(query, key, value, average_attn_weights=False)[1].log()
    report = qk_clip_(attention, 0.25, peaks=peaks)
    scaled = attention(query, key, value, average_attn_weights=False)[1].log()
    scales = torch.tensor(report.scales)[:, None, None]
    torch.testing.assert_close(  # log-softmax up to a shift
        scaled - scaled.mean(-1, keepdim=True),
        scales * (weights - weights.mean(-1, keepdim=True)),
        atol=1e-4,
        rtol=1e-4,
    )
    assert torch.equal(other, kept)
    assert report.clipped
    torch.testing.assert_close(peak_logits(attention, query, key), peaks.clamp(max=0.25), rtol=1e-4, atol=1e-5)


def test_peaks_respect_the_mask() -> None:
    attention = StableAttention(8, 2, qk_norm=False, causal=True)
    x = torch.randn(1, 4, 8)
    x[:, 3] *= 100  # only the last position sees the last
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[3] = False
    mask[3, 0] = True
    assert peak_logits(attention, x).max() > 10 * peak_logits(attention, x[:, :3]).max()
    attention.q_proj.weight.data.zero_()
    attention.q_proj.bias.data.zero_()
    assert peak_logits(attention, x, mask=mask).abs().max() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_peak_that_is_not_finite_changes_nothing_and_is_reported(bad: float) -> None:
    attention = StableAttention(8, 2, qk_norm=False)
    before = attention.q_proj.weight.clone()
    report = qk_clip_(attention, peaks=torch.tensor([bad, 50.0]))
    assert not report.finite
    assert not report.clipped
    assert torch.equal(attention.q_proj.weight, before)


def test_peaks_are_recorded_in_training_only_and_start_again_after_a_clip() -> None:
    attention = StableAttention(8, 2, qk_norm=False, record_peaks=True).eval()
    attention(torch.randn(1, 3, 8))
    with pytest.raises(steadystep.MisuseError, match="no peaks"):
        qk_clip_(attention)
    attention.train()
    attention(torch.randn(1, 3, 8))
    assert qk_clip_(attention).finite
    assert attention.peaks is None
    assert "peaks" not in attention.state_dict()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: StableAttention(10, 3), steadystep.ConfigError, "multiple of n_heads"),
        (lambda: StableAttention(8, 2, logit_cap=0.0), steadystep.ConfigError, "logit_cap"),
        (lambda: StableAttention(8, 2, dropout=1.0), steadystep.ConfigError, "dropout"),
        (lambda: StableAttention(8, 2, init_method="he"), steadystep.ConfigError, "'he' is unknown"),
        (lambda: StableMLP(0, 2), steadystep.ConfigError, "d_model"),
        (lambda: StableMLP(4, 2, dropout=-0.1), steadystep.ConfigError, "dropout"),
        (lambda: StableMLP(4, 2, init_method="he"), steadystep.ConfigError, "'he' is unknown"),
        (lambda: qk_clip_(StableAttention(8, 2), peaks=torch.ones(2)), steadystep.MisuseError, "with qk_norm"),
        (lambda: qk_clip_(nn.Linear(2, 2), peaks=torch.ones(2)), steadystep.MisuseError, "expected a StableAttention"),
        (lambda: qk_clip_(nn.MultiheadAttention(8, 2)), steadystep.MisuseError, "no peaks"),
        (lambda: qk_clip_(nn.MultiheadAttention(8, 2), peaks=torch.ones(3)), steadystep.MisuseError, "2 heads"),
        (lambda: qk_clip_(nn.MultiheadAttention(8, 2), 0.0), steadystep.ConfigError, "max_logit"),
    ],
)
def test_what_cannot_work_is_an_error(call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
