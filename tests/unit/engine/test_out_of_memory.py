"""Out of memory inside a guarded step: the same batch in parts, the same update to rounding, nothing lost."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep

ROWS = 16
pytestmark = pytest.mark.filterwarnings("ignore:steadystep. out of memory")


class SmallDevice:
    """Raises what torch raises when a batch has more rows than fit, in the forward or in the backward pass."""

    def __init__(self, rows: int, *, backward: bool = False) -> None:
        self.rows, self.backward = rows, backward
        self.seen: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) <= self.rows:
            return x
        if not self.backward:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return TooMuch.apply(x)


class TooMuch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


def train(
    device: SmallDevice, *, steps: int, config: dict[str, Any], weight: Callable[[int], float] | None = None
) -> tuple[nn.Module, steadystep.Guard, list[float]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    guard = steadystep.Guard(model, optimizer, config=config)

    def loss(x: Tensor) -> Tensor:
        # the second layer is what does not fit: by then the last layer's gradients exist when backward fails
        return model[2](device(torch.tanh(model[0](x)))).square().mean()

    losses = []
    for i, x in enumerate(batches(steps)):
        outcome = guard.step(loss, batch=x, weight=None if weight is None else weight(i))
        losses.append(outcome.loss)
    return model, guard, losses


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_update_is_that_of_the_whole_batch(backward: bool, accumulation: int, weighted: bool) -> None:
    config = {"training": {"gradient_accumulation_steps": accumulation}}
    weight = (lambda i: float(1 + i % 3)) if weighted else None
    whole, _, expected = train(SmallDevice(ROWS), steps=6, config=config, weight=weight)
    small = SmallDevice(3, backward=backward)
    parts, guard, got = train(small, steps=6, config=config, weight=weight)
    assert guard.updates == 6 // accumulation
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert got == pytest.approx(expected, rel=1e-12)
    # 16 whole, whole again, 8, 4, 2; later batches begin with parts that fit
    assert small.seen[0] == ROWS
    assert max(small.seen[-5:]) <= 3


def test_memory_that_runs_out_in_the_middle_of_a_group_costs_no_earlier_micro_batch() -> None:
    config = {"training": {"gradient_accumulation_steps": 4}}
    whole, _, _ = train(SmallDevice(ROWS), steps=8, config=config)

    class Later(SmallDevice):
        def __call__(self, x: Tensor) -> Tensor:
            self.rows = ROWS if len(self.seen) < 2 else 5
            return super().__call__(x)

    for backward in (False, True):
        model, guard, _ = train(Later(5, backward=backward), steps=8, config=config)
        assert guard.updates == 2
        for a, b in zip(whole.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_split_when_out_of_memory_false_leaves_the_error_alone() -> None:
    off = {"training": {"split_when_out_of_memory": False}}
    for config in (off, {"mode": "observe"}):
        with pytest.raises(torch.OutOfMemoryError):
            train(SmallDevice(3), steps=1, config=config)


def test_without_a_batch_the_error_says_what_would_help() -> None:
    model = net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        guard.step(loss)
    assert any("batch=" in note for note in caught.value.__notes__)
    assert guard.step(lambda: model(batches(1)[0]).mean()).stepped


def test_one_row_that_does_not_fit_ends_the_run_with_nothing_changed() -> None:
    model = net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]

    def loss(x: Tensor) -> Tensor:
        return model(SmallDevice(0)(x)).mean()

    with pytest.raises(steadystep.TrainingHalted, match="single row"):
        guard.step(loss, batch=batches(1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_other_errors_of_the_closure_are_not_taken_for_it() -> None:
    model = net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []

    def loss(x: Tensor) -> Tensor:
        calls.append(len(x))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        guard.step(loss, batch=batches(1)[0])
    assert calls == [ROWS]


def test_an_earlier_micro_batch_that_cannot_be_run_again_is_an_error_not_a_wrong_gradient() -> None:
    model = net()
    config = {"training": {"gradient_accumulation_steps": 2}}
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    first, second = batches(2)
    guard.step(model(first).mean())
    device = SmallDevice(4)
    with pytest.raises(steadystep.MisuseError, match="out of memory"):
        guard.step(lambda x: model(device(x)).mean(), batch=second)
    assert guard.updates == 0


def test_the_size_that_fits_is_remembered_by_a_resumed_run() -> None:
    _, guard, _ = train(SmallDevice(4), steps=2, config={})
    saved = json.loads(json.dumps(guard.state_dict()))
    model = net()
    twin = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    twin.load_state_dict(saved)
    device = SmallDevice(4)
    twin.step(lambda x: model(device(x)).square().mean(), batch=batches(1)[0])
    assert device.seen == [4, 4, 4, 4]


def test_memory_that_suffices_the_second_time_leaves_no_trace_of_the_first() -> None:
    class Once(SmallDevice):
        def __call__(self, x: Tensor) -> Tensor:
            self.rows = 3 if not self.seen else ROWS
            return super().__call__(x)

    whole, _, _ = train(SmallDevice(ROWS), steps=1, config={})
    model, _, _ = train(Once(3, backward=True), steps=1, config={})
    for a, b in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_memory_that_runs_out_when_a_group_is_run_again() -> None:
    """The third micro-batch is bad; running the other two again, the second no longer fits."""
    config = {"training": {"gradient_accumulation_steps": 3}}
    first, second, third = batches(3)
    results = []
    for tight in (False, True):
        model = net()
        guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.05), config=config)
        again: list[int] = []

        def loss(x: Tensor, model: nn.Module = model, again: list[int] = again, tight: bool = tight) -> Tensor:
            hidden = torch.tanh(model[0](x))
            if tight and again and torch.equal(x, second) and len(x) == ROWS:
                hidden = TooMuch.apply(hidden)
            if torch.equal(x, third):
                again.append(1)
                return model[2](hidden).mean() * float("nan")
            return model[2](hidden).square().mean()

        for x in (first, second, third):
            outcome = guard.step(loss, batch=x)
        assert outcome.left_out == (2,)
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


class Flaky(SmallDevice):
    """Another program has the memory for a while."""

    def __init__(self, rows: int, *, until: int) -> None:
        super().__init__(rows)
        self.until = until

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.seen) > self.until:
            self.rows = ROWS
        return super().__call__(x)


def test_what_fitted_is_not_remembered_for_ever() -> None:
    device = Flaky(1, until=200)
    _, guard, _ = train(device, steps=300, config={})
    assert 1 in device.seen
    assert device.seen[-10:] == [ROWS] * 10, "memory is there again, and so are whole batches"
    assert guard.updates == 300


def test_a_device_that_stays_small_is_asked_ever_less_often() -> None:
    device = SmallDevice(4)
    train(device, steps=700, config={})
    tries = [i for i, rows in enumerate(device.seen) if rows > 4]
    assert len(tries) <= 2 + 2 + 4, "twice as long after each failure: 64, 128, 256 batches"


def test_a_batch_of_which_nothing_fits_says_nothing_about_the_next_one() -> None:
    model = net()
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.05))
    long, baseline = torch.ones(8, 4, dtype=torch.float64) * 9, torch.ones(8, 4, dtype=torch.float64)
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append(len(x))
        if x[0, 0] == 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x).square().mean()

    with pytest.raises(steadystep.TrainingHalted, match="single row"):
        guard.step(loss, batch=long)
    guard.step(loss, batch=baseline)
    assert seen[-1] == 8


@pytest.mark.parametrize("rows", [16, 13, 5])
def test_batchnorm_never_gets_a_single_row(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.05))
    device, x = SmallDevice(3), torch.randn(rows, 4)
    for _ in range(3):
        assert guard.step(lambda batch: model(device(batch)).square().mean(), batch=x).stepped
    assert min(device.seen) >= 2
    device.rows = 1
    with pytest.raises(steadystep.TrainingHalted, match="BatchNorm"):
        guard.step(lambda batch: model(device(batch)).square().mean(), batch=x)
