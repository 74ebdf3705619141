"""Promise 2: a non-finite number never reaches a weight, a moment or a buffer; the batch leaves no trace."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from tests.loops import OPTIMIZERS, assert_same, batches, full_state, is_finite, small_net, squared

pytestmark = pytest.mark.core

BAD = [math.nan, math.inf, -math.inf]


class GradPoison:
    """Puts `value` into one gradient element of the backward passes that follow `armed = True`."""

    def __init__(self, parameter: Tensor, value: float) -> None:
        self.armed, self.value = False, value
        parameter.register_hook(self)

    def __call__(self, grad: Tensor) -> Tensor | None:
        if not self.armed:
            return None
        grad = grad.clone()
        grad.view(-1)[-1] = self.value
        return grad


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_gradient_element_leaves_no_trace(name: str, value: float) -> None:
    model = small_net()
    optimizer = OPTIMIZERS[name](model.parameters())
    poison = GradPoison(model[4].weight, value)
    guard = steadystep.Guard(model, optimizer)
    good, bad = batches(5)[:4], batches(5)[4]
    for x in good:
        assert guard.step(lambda x=x: squared(model, x)).stepped
    before = full_state(model, optimizer)
    poison.armed = True
    outcome = guard.step(lambda: squared(model, bad))
    poison.armed = False
    assert not outcome.stepped
    assert outcome.diagnosis.cause == "non-finite-gradient"
    assert math.isfinite(outcome.loss)
    assert outcome.findings[0].where == ("4.weight",)
    assert_same(before, full_state(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert guard.step(lambda: squared(model, bad)).stepped


@pytest.mark.parametrize("value", BAD)
def test_a_bad_loss_over_finite_gradients(value: float) -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    guard.step(lambda: squared(model, x))
    before = full_state(model, optimizer)
    outcome = guard.step(lambda: squared(model, x) + value)  # the constant has no gradient
    assert not outcome.stepped
    assert outcome.diagnosis.cause == "non-finite-loss"
    assert math.isfinite(outcome.signals.grad_norm)
    assert repr(outcome.loss) == repr(value)
    assert_same(before, full_state(model, optimizer))


def test_an_infinite_running_variance_is_an_incident_though_loss_and_gradients_are_finite() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]

    def loss(scale: float) -> Tensor:
        return model(x * scale).mean()

    guard.step(lambda: loss(1.0))
    before = full_state(model, optimizer)
    outcome = guard.step(lambda: loss(1e25))
    assert math.isfinite(outcome.loss)
    assert math.isfinite(outcome.signals.grad_norm)
    assert outcome.diagnosis.cause == "non-finite-buffer"
    assert outcome.signals.bad_buffers == ("1.running_var",)
    assert_same(before, full_state(model, optimizer))


@pytest.mark.parametrize("style", ["closure", "loss"])
def test_a_skipped_batch_leaves_no_trace_in_running_statistics(style: str) -> None:
    """Against the run that never saw the bad batch at all."""
    data = batches(8)
    seen, spared = small_net(dropout=0.0), small_net(dropout=0.0)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (seen, spared)]
    guards = [steadystep.Guard(m, o) for m, o in zip((seen, spared), optimizers, strict=True)]

    def step(i: int, model: nn.Module, x: Tensor) -> None:
        guards[i].step(squared(model, x) if style == "loss" else lambda: squared(model, x))

    for number, x in enumerate(data):
        step(0, seen, x)
        step(1, spared, x)
        if number in (0, 3, 4):
            step(0, seen, x * math.inf)
    assert guards[0].attempts == 11
    assert guards[0].updates == guards[1].updates == 8
    assert_same(full_state(seen, optimizers[0]), full_state(spared, optimizers[1]))


@given(st.lists(st.sampled_from(["good", "nan-input", "inf-loss", "nan-grad"]), max_size=12), st.integers(1, 3))
def test_whatever_the_order_weights_moments_and_buffers_stay_finite(kinds: list[str], accumulate: int) -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())
    poison = GradPoison(model[0].weight, math.nan)
    config = {"training": {"gradient_accumulation_steps": accumulate}}
    guard = steadystep.Guard(model, optimizer, config=config)
    for kind, x in zip(kinds, batches(12), strict=False):
        poison.armed = kind == "nan-grad"
        extra = math.inf if kind == "inf-loss" else 0.0
        data = x * math.nan if kind == "nan-input" else x
        guard.step(lambda data=data, extra=extra: squared(model, data) + extra)
    guard.flush()
    assert is_finite(full_state(model, optimizer))


def test_fp16_a_bad_loss_does_not_move_the_scale() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": "fp16"}})
    x = batches(1)[0]
    guard.step(lambda: model(x).float().square().mean())
    before, state = guard.precision.state_dict(), full_state(model, optimizer)
    outcome = guard.step(lambda: model(x * 1e5).float().square().mean())
    assert outcome.diagnosis.cause == "forward-overflow"
    assert {finding.severity for finding in outcome.findings} == {"critical"}
    assert guard.precision.state_dict() == before
    assert_same(state, full_state(model, optimizer))
    assert guard.step(lambda: model(x).float().square().mean()).stepped


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.full((8, 6), math.nan),
        lambda: {"x": torch.full((8, 6), math.nan), "y": torch.zeros(3, dtype=torch.long)},
        lambda: (torch.zeros(2), [torch.full((8, 6), math.inf)]),
    ],
)
def test_a_bad_batch_is_named_as_the_cause_when_it_was_given(make: Callable[[], object]) -> None:
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = make()

    def loss(batch: object) -> Tensor:
        tensor = batch if isinstance(batch, Tensor) else batch["x"] if isinstance(batch, dict) else batch[1][0]
        return squared(model, tensor)

    outcome = guard.step(loss, batch=batch)
    assert outcome.diagnosis.cause == "non-finite-input"
    assert "data" in outcome.diagnosis.advice


def test_never_surrenders_stops_when_skipping_does_not_help() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"max_skips_in_a_row": 3}})
    x = batches(1)[0] * math.nan
    before = full_state(model, optimizer)
    for _ in range(2):
        assert not guard.step(lambda: squared(model, x)).stepped
    with pytest.raises(steadystep.TrainingHalted, match="skipped 3 updates in a row") as caught:
        guard.step(lambda: squared(model, x))
    assert caught.value.step == 2
    assert_same(before, full_state(model, optimizer))
    good = batches(1)[0]
    with pytest.raises(steadystep.TrainingHalted):
        guard.step(lambda: squared(model, x))
    assert guard.step(lambda: squared(model, good)).stepped, "usable afterwards"
    assert not guard.step(lambda: squared(model, x)).stepped, "an accepted update settles the account"
