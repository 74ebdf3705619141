"""Parts that work without a guard, on a device."""

import math

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep import clip, layers, memory
from steadystep.clip import PercentileClip, TensorEMAClip, ZScoreClip
from steadystep.init import check_init
from steadystep.precision import underflow_share
from tests.device import notgpu
from tests.device.loops import closure_of, data, net
from tests.loops import assert_same, full_state

notgpu.register()
D = notgpu.DEVICE
BATCH = data(1)[0]


def with_gradients() -> nn.Module:
    model = net(dropout=0.0)
    closure_of(model)(BATCH).backward()
    return model


CLIPS = {
    "global norm": lambda p: clip.clip_global_norm_(p, max_norm=0.1),
    "value": lambda p: clip.clip_value_(p, max_value=0.01),
    "per unit": lambda p: clip.agc_(p),
    "z-score": lambda p: ZScoreClip(warmup_steps=4, max_norm=0.1).clip_(p),
    "percentile": lambda p: PercentileClip(percentile=60, history_steps=6).clip_(p),
    "tensor EMA": lambda p: TensorEMAClip(warmup_steps=3).clip_(p),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clips_read_the_device_once(name: str) -> None:
    params = list(with_gradients().parameters())
    with notgpu.counted() as counts:
        report = CLIPS[name](params)
    assert math.isfinite(report.norm_before)
    assert counts.waits == 1, counts


def test_find_lr_leaves_the_model_as_it_was() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full_state(model, optimizer)
    closure = closure_of(model)
    steadystep.find_lr(model, optimizer, lambda: closure(BATCH), num_steps=12)
    assert_same(before, full_state(model, optimizer))


def test_layers_initial_checks_and_underflow() -> None:
    attention = layers.StableAttention(8, 2).to(D)
    x = torch.randn(2, 5, 8, device=D)
    attention(x).sum().backward()
    mlp = layers.StableMLP(8, 16).to(D)
    mlp(x).sum().backward()
    assert math.isfinite(float(layers.z_loss(x)))
    assert float(underflow_share([p.grad for p in attention.parameters() if p.grad is not None])) >= 0.0
    model = net(dropout=0.0)
    assert check_init(model, BATCH[0]).layers


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    def gradients(*, recompute: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        torch.get_device_module(D).manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(*blocks).to(D)
        if recompute:
            memory.checkpoint_blocks(model)
        model(torch.ones(4, 8, device=D)).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert_same(gradients(recompute=False), gradients(recompute=True))
