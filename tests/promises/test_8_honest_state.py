"""Promise 8: everything stateful round-trips through JSON and continues as if never interrupted."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steadystep
from tests.loops import assert_same, batches, full_state, small_net, squared


def build(precision: str):
    torch.manual_seed(0)
    model = small_net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    guard = steadystep.Guard(
        model,
        optimizer,
        # Without rollback: states to go back to live in memory and do not survive a resume.
        config={
            "training": {"mixed_precision": precision, "auto_recovery": False},
            "recovery": {"max_skips_in_a_row": 4},
        },
        schedule=lambda step: 1.0 / (1 + step),
    )
    return model, optimizer, guard


def run(model, guard, kinds) -> list[str]:
    said = []
    for kind, x in kinds:
        data = x * math.nan if kind == "bad" else x * (100.0 if kind == "large" else 1.0)
        try:
            said.append(repr(guard.step(lambda data=data: squared(model, data))))
        except steadystep.TrainingHalted as halted:
            said.append(str(halted))
    return said


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@given(kinds=st.lists(st.sampled_from(["good", "good", "bad", "large"]), max_size=12), cut=st.integers(0, 12))
def test_resume_is_invisible(precision: str, kinds: list[str], cut: int) -> None:
    todo = list(zip(kinds, batches(12), strict=False))
    whole_model, whole_optimizer, whole = build(precision)
    expected = run(whole_model, whole, todo)

    model, optimizer, guard = build(precision)
    got = run(model, guard, todo[:cut])
    saved = json.dumps(guard.state_dict())
    resumed_model, resumed_optimizer, resumed = build(precision)
    resumed_model.load_state_dict(model.state_dict())
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(json.loads(saved))
    got += run(resumed_model, resumed, todo[cut:])
    assert got == expected
    assert_same(full_state(whole_model, whole_optimizer), full_state(resumed_model, resumed_optimizer))
    assert json.dumps(resumed.state_dict()) == json.dumps(whole.state_dict())


def test_a_state_from_another_format_or_precision_is_refused() -> None:
    _, _, guard = build("fp32")
    with pytest.raises(steadystep.CheckpointError, match="format 2"):
        guard.load_state_dict({**guard.state_dict(), "format": 2})
    model, _, half = build("fp16")
    x = batches(1)[0]
    half.step(lambda: squared(model, x))
    with pytest.raises(steadystep.CheckpointError, match="loss scaler"):
        guard.load_state_dict(half.state_dict())
