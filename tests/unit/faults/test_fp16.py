"""Gradients that leave the range of fp16: what a loss scaler meets, and what fp32 and bf16 never notice."""

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.faults import fp16_overflow, fp16_underflow
from tests.loops import assert_same, batches, full_state, is_finite


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def squared(net: nn.Module, x: Tensor) -> Tensor:
    """Small enough for a scale of 2^16."""
    return (net(x).squeeze(-1) - x.sum(-1)).square().mean() * 1e-3


def gradients(dtype: torch.dtype, *, kind: str, scale: float = 2.0**16) -> tuple[float, list[Tensor]]:
    net, x = model(), batches(1)[0]
    make = {"overflow": fp16_overflow, "underflow": fp16_underflow, "none": None}[kind]
    fault = make(net, steps={1}) if make else fp16_overflow(net, steps=())
    with fault.at(1), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = fault.loss(1, squared(net, x))
    with fault.at(1):
        (loss * scale).backward()
    return loss.item(), [p.grad / scale for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["overflow", "underflow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_never_notice(kind: str, dtype: torch.dtype) -> None:
    (loss, ours), (same, theirs) = gradients(dtype, kind=kind), gradients(dtype, kind="none")
    assert loss == same
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_what_overflows_is_not_finite_and_the_loss_is() -> None:
    loss, ours = gradients(torch.float16, kind="overflow")
    assert loss == gradients(torch.float16, kind="none")[0]
    assert not any(g.isfinite().all() for g in ours)


def test_a_scale_low_enough_cures_an_overflow() -> None:
    ours = gradients(torch.float16, kind="overflow", scale=2.0**-16)[1]
    theirs = gradients(torch.float16, kind="none", scale=2.0**8)[1]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_what_underflows_is_zero() -> None:
    ours = gradients(torch.float16, kind="underflow")[1]
    assert not any(g.any() for g in ours)
    assert all(g.any() for g in gradients(torch.float16, kind="none")[1])


def test_a_guard_with_a_scaler_backs_off_and_goes_on() -> None:
    net, data = model(), batches(12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    fault = fp16_overflow(net, steps=range(4, 6))
    stepped, scales = [], []
    with steadystep.Guard(net, optimizer, config={"training": {"mixed_precision": "fp16"}}) as guard:
        for step, x in enumerate(data):
            with fault.at(step):
                outcome = guard.step(lambda b, step=step: fault.loss(step, squared(net, b)), batch=x)
            stepped.append(outcome.stepped)
            assert outcome.signals is not None
            scales.append(outcome.signals.scale)
    assert stepped == [True] * 4 + [False] * 2 + [True] * 6
    assert scales[0] == 4 * scales[-1]
    assert is_finite(full_state(net, optimizer))


def test_torchs_own_scaler_skips_exactly_those_steps() -> None:
    ends = []
    for without in (False, True):
        net, data = model(), batches(8)
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
        fault = fp16_overflow(net, steps=() if without else {3})
        for step, x in enumerate(data):
            if without and step == 3:
                continue
            with fault.at(step):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = fault.loss(step, squared(net, x))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        ends.append(full_state(net, optimizer))
    assert_same(*ends)
