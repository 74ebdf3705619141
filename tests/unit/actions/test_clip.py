"""`clip_rule: agc` and `tensor-ema`: the same as the part alone, asked about the same gradients."""

import json
import math

import pytest
import torch
from torch import nn

import steadystep
from steadystep.clip import TensorEMAClip, agc_, clip_global_norm_
from tests.loops import assert_same, batches, full_state, small_net, squared


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("rule", ["agc", "tensor-ema"])
def test_the_same_as_the_part_alone(rule: str, max_norm: float | None) -> None:
    plain, guarded = small_net(dropout=0.0), small_net(dropout=0.0)
    plain_optimizer, guarded_optimizer = sgd(plain), sgd(guarded)
    config = {"training": {"clip_rule": rule, "max_grad_norm": max_norm}}
    guard = steadystep.Guard(guarded, guarded_optimizer, config=config)
    alone = TensorEMAClip()
    clipped = 0
    for x in batches(130):
        squared(plain, x).backward()
        report = agc_(plain.named_parameters()) if rule == "agc" else alone.clip_(plain.named_parameters())
        if max_norm is not None:
            clip_global_norm_(plain.parameters(), max_norm=max_norm)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        clipped += report.clipped
        guard.step(lambda x=x: squared(guarded, x))
    assert clipped
    assert_same(full_state(plain, plain_optimizer), full_state(guarded, guarded_optimizer))


def test_what_was_learned_is_saved_and_a_nan_teaches_nothing() -> None:
    model = small_net(dropout=0.0)
    guard = steadystep.Guard(model, sgd(model), config={"training": {"clip_rule": "tensor-ema"}})
    for x in batches(10):
        guard.step(lambda x=x: squared(model, x))
    saved = guard.state_dict()["clip rule"]
    x = batches(1)[0] * math.nan
    guard.step(lambda: squared(model, x))
    assert guard.state_dict()["clip rule"] == saved
    twin = small_net()
    again = steadystep.Guard(twin, sgd(twin), config={"training": {"clip_rule": "tensor-ema"}})
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert again.state_dict()["clip rule"] == saved


@pytest.mark.parametrize("share", [0.5, 0.999, 0.99999, 1.0, 1.00001, 1.001, 2.0])
def test_around_the_limit_it_is_what_torch_does(share: float) -> None:
    plain, guarded = small_net(dropout=0.0), small_net(dropout=0.0)
    plain_optimizer, guarded_optimizer = sgd(plain), sgd(guarded)
    (x,) = batches(1)
    squared(plain, x).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]).item()
    guard = steadystep.Guard(guarded, guarded_optimizer, config={"training": {"max_grad_norm": share * norm}})
    torch.nn.utils.clip_grad_norm_(plain.parameters(), share * norm)
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    guard.step(lambda: squared(guarded, x))
    assert_same(full_state(plain, plain_optimizer), full_state(guarded, guarded_optimizer))
