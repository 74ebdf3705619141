"""Groups of micro-batches: against a slow, obvious twin, and against runs that never saw the bad ones."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.engine.microbatch_group import Group, MicroBatch
from tests.loops import assert_same, batches, full_state, small_net, squared


def guarded(model: nn.Module, size: int, **training) -> steadystep.Guard:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return steadystep.Guard(model, optimizer, config={"training": {"gradient_accumulation_steps": size, **training}})


def reference_gradient(weights: list[float], losses: list[Tensor], parameter: Tensor) -> Tensor:
    """The twin: the whole weighted mean in one graph, in double."""
    total = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    return torch.autograd.grad(total, parameter)[0]


@given(
    st.lists(st.floats(0.25, 1e4), min_size=1, max_size=6),
    st.integers(1, 6),
    st.data(),
)
def test_collected_gradients_are_those_of_the_weighted_mean(
    weights: list[float], size: int, data: st.DataObject
) -> None:
    slopes = data.draw(st.lists(st.floats(-10, 10), min_size=len(weights), max_size=len(weights)))
    weights = weights[:size]
    parameter = torch.ones((), dtype=torch.float64, requires_grad=True)
    group = Group(size)
    for weight, slope in zip(weights, slopes, strict=False):
        number = group.check_weight(weight)
        group.scaled(slope * parameter, number).backward()
        group.add(MicroBatch(loss=torch.tensor(slope), weight=number))
    got = parameter.grad * group.correction(range(len(weights)))
    expected = reference_gradient(weights, [s * parameter for s in slopes[: len(weights)]], parameter)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@given(st.integers(1, 9), st.floats(0.1, 1e6))
def test_equal_weights_in_a_full_group_need_no_correction(size: int, weight: float) -> None:
    group = Group(size)
    loss = torch.tensor(2.0)
    for _ in range(size):
        number = group.check_weight(weight)
        assert torch.equal(group.scaled(loss, number), loss / size)
        group.add(MicroBatch(loss=loss, weight=number))
    assert group.correction(range(size)) == pytest.approx(1.0, rel=1e-15)


def test_losses_are_scaled_by_the_largest_weight_seen_so_that_fp16_stays_in_range() -> None:
    group = Group(2)
    loss = torch.tensor(1.0)
    for _ in range(2):
        factors = [group.scaled(loss, group.check_weight(weight)).item() for weight in (1, 4096)]
        group.clear()
    assert factors == [0.5 / 4096, 0.5]


def test_token_weights_give_the_gradient_of_the_long_batch() -> None:
    model = nn.Linear(6, 1)
    twin = nn.Linear(6, 1)
    twin.load_state_dict(model.state_dict())
    long = torch.randn(24, 6)
    parts = [long[:3], long[3:10], long[10:24]]
    guard = guarded(model, 3)
    for part in parts:
        outcome = guard.step(lambda part=part: squared(model, part), weight=len(part))
    whole = guarded(twin, 1).step(lambda: squared(twin, long))
    assert outcome.loss == pytest.approx(whole.loss, rel=1e-6)
    assert outcome.signals.grad_norm == pytest.approx(whole.signals.grad_norm, rel=1e-5)
    torch.testing.assert_close(model.weight, twin.weight)


def test_a_short_last_group_is_a_mean_over_what_it_has() -> None:
    model = nn.Linear(6, 1)
    twin = nn.Linear(6, 1)
    twin.load_state_dict(model.state_dict())
    a, b = batches(2)
    guard = guarded(model, 4)
    assert guard.flush() is None
    assert guard.step(lambda: squared(model, a)).pending
    assert guard.step(lambda: squared(model, b)).pending
    outcome = guard.flush()
    assert outcome is not None
    assert outcome.stepped
    whole = guarded(twin, 1).step(lambda: squared(twin, torch.cat([a, b])))
    assert outcome.signals.grad_norm == pytest.approx(whole.signals.grad_norm, rel=1e-5)
    torch.testing.assert_close(model.weight, twin.weight)
    assert guard.flush() is None


def test_batches_flushes_at_the_end_of_each_epoch() -> None:
    model = nn.Linear(6, 1)
    guard = guarded(model, 4)
    for _ in range(2):
        for x in guard.batches(batches(6)):
            guard.step(lambda x=x: squared(model, x))
    assert guard.updates == 4


def test_micro_batches_report_their_own_loss_without_deciding() -> None:
    model = nn.Linear(6, 1)
    guard = guarded(model, 2)
    a, b = batches(2)
    first = guard.step(lambda: squared(model, a))
    assert first.pending
    assert not first.stepped
    assert isinstance(first.loss, float)
    assert first.loss == squared(model, a).item()
    expected = (first.loss + squared(model, b).item()) / 2
    second = guard.step(lambda: squared(model, b))
    assert not second.pending
    assert second.loss == pytest.approx(expected)


@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("kind", ["input", "gradient"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bad_micro_batch_is_left_out_as_if_never_seen(bad: int, kind: str, precision: str) -> None:
    """Weights, moments, buffers and loss equal those of a group of three, dropout included."""
    data = batches(4)
    model, twin = small_net(), small_net()
    armed = {"now": False}
    model[4].weight.register_hook(lambda g: g * math.nan if armed["now"] else None)
    guard = guarded(model, 4, mixed_precision=precision)
    twin_guard = guarded(twin, 3, mixed_precision=precision)

    def loss(i: int) -> Tensor:
        torch.manual_seed(i)  # the same dropout in both runs
        armed["now"] = kind == "gradient" and i == bad
        return squared(model, data[i] * (math.nan if kind == "input" and i == bad else 1.0))

    for i in range(4):
        outcome = guard.step(lambda i=i: loss(i))
    for i in range(4):
        if i != bad:
            torch.manual_seed(i)
            expected = twin_guard.step(lambda i=i: squared(twin, data[i]))
    assert outcome.stepped
    assert outcome.left_out == (bad,)
    assert outcome.plan.actions == ("leave-out",)
    assert outcome.loss == expected.loss
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("scope", ["cells", "globals"])
def test_closures_are_bound_to_the_batch_they_were_given(scope: str) -> None:
    """The loop variable has moved on when the group is computed again."""
    model, twin = small_net(dropout=0.0), small_net(dropout=0.0)
    data = batches(4)
    data[1] = data[1] * math.nan
    guard = guarded(model, 4)
    if scope == "cells":
        for x in data:
            outcome = guard.step(lambda: squared(model, x))  # noqa: B023 - the very trap
    else:
        space = {"guard": guard, "model": model, "squared": squared, "data": data}
        exec("for x in data:\n    outcome = guard.step(lambda: squared(model, x))", space)
        outcome = space["outcome"]
    assert outcome.left_out == (1,)
    twin_guard = guarded(twin, 3)
    for x in (data[0], data[2], data[3]):
        twin_guard.step(lambda x=x: squared(twin, x))
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


def test_random_numbers_after_a_recomputed_group_are_those_of_an_undisturbed_one() -> None:
    drawn = []
    for factor in (1.0, math.nan):
        model = small_net()
        guard = guarded(model, 2)
        torch.manual_seed(5)
        a, b = batches(2)
        guard.step(lambda a=a, model=model: squared(model, a))
        guard.step(lambda b=b, model=model, factor=factor: squared(model, b * factor))
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn)


def test_a_closure_that_does_not_repeat_drops_the_group() -> None:
    model = small_net()
    guard = guarded(model, 3)
    feed = iter([*batches(2), batches(1)[0] * math.nan, *(x * 5 for x in batches(10, seed=9))])
    before = full_state(model, guard._optimizer)
    for _ in range(2):
        guard.step(lambda: squared(model, next(feed)))
    with pytest.warns(UserWarning, match="re-running a closure gave a different loss"):
        outcome = guard.step(lambda: squared(model, next(feed)))
    assert not outcome.stepped
    assert outcome.left_out == ()
    assert_same(before, full_state(model, guard._optimizer))


def test_plain_losses_drop_the_group() -> None:
    model = small_net()
    guard = guarded(model, 2)
    before = full_state(model, guard._optimizer)
    a, b = batches(2)
    guard.step(squared(model, a))
    outcome = guard.step(squared(model, b * math.nan))
    assert not outcome.stepped
    assert outcome.plan.actions == ("skip-step",)
    assert_same(before, full_state(model, guard._optimizer))
    assert guard.step(squared(model, a)).pending
    assert guard.step(squared(model, b)).stepped


def test_nothing_is_run_again_in_a_healthy_run() -> None:
    model = small_net()
    guard = guarded(model, 4)
    calls = []
    for x in batches(12):
        guard.step(lambda x=x: (calls.append(1), squared(model, x))[1])
    assert len(calls) == 12


def test_a_loss_known_to_be_bad_is_left_out_when_the_group_is_run_again() -> None:
    model = small_net()
    guard = guarded(model, 4)
    calls = []
    for i, x in enumerate(batches(4)):
        data = x * math.nan if i == 2 else x
        guard.step(lambda i=i, data=data: (calls.append(i), squared(model, data))[1])
    assert calls == [0, 1, 2, 3, 2, 0, 1, 3]  # once, to see where it began; then the group without it


def test_all_members_bad_is_a_refusal() -> None:
    model = small_net()
    guard = guarded(model, 2)
    before = full_state(model, guard._optimizer)
    for x in batches(2):
        outcome = guard.step(lambda x=x: squared(model, x * math.nan))
    assert not outcome.stepped
    assert_same(before, full_state(model, guard._optimizer))


def test_fp16_leaves_out_a_bad_loss_and_keeps_the_scale() -> None:
    model = nn.Linear(6, 1)
    guard = guarded(model, 2, mixed_precision="fp16")
    a, b = batches(2)
    guard.step(lambda: 0.01 * model(a).float().square().mean())
    outcome = guard.step(lambda: 0.01 * model(b * math.inf).float().square().mean())
    assert outcome.left_out == (1,)
    assert outcome.stepped
    assert guard.precision.state_dict()["scale"] == 65536.0
    assert guard.precision.state_dict()["_growth_tracker"] == 1


def test_a_micro_batch_of_weight_zero_counts_nothing() -> None:
    model, twin = nn.Linear(6, 1), nn.Linear(6, 1)
    twin.load_state_dict(model.state_dict())
    a, b = batches(2)
    guard = guarded(model, 2)
    guard.step(lambda: squared(model, a) * math.nan, weight=0)  # a mean over no tokens
    outcome = guard.step(lambda: squared(model, b), weight=7)
    assert outcome.stepped
    assert outcome.plan.proceeds
    expected = guarded(twin, 1).step(lambda: squared(twin, b))
    assert outcome.loss == expected.loss
    torch.testing.assert_close(model.weight, twin.weight)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_without_meaning_is_refused(weight: float) -> None:
    model = nn.Linear(6, 1)
    guard = guarded(model, 2)
    x = batches(1)[0]
    with pytest.raises(steadystep.MisuseError, match="weight"):
        guard.step(lambda: squared(model, x), weight=weight)
    guard.step(lambda: squared(model, x))
    with pytest.raises(steadystep.MisuseError, match="some micro-batches"):
        guard.step(lambda: squared(model, x), weight=3)


def test_one_process_does_not_ask_each_gradient_whether_it_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking costs 7 µs for each of them."""

    def asked(_: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr("steadystep.engine.microbatches.local_part", asked)
    model = nn.Linear(6, 1)
    guard = guarded(model, 2)
    for weight, x in zip((1, 2), batches(2), strict=True):
        outcome = guard.step(lambda x: squared(model, x), batch=x, weight=weight)
    assert outcome.stepped
