"""Faults do what they say at their steps, repeat within a step, and leave nothing behind."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.faults import (
    NO_FAULT,
    Fault,
    bad_gradient,
    bad_loss,
    creeping_lr,
    drifting_loss,
    flipped_bit,
    scaled_data,
    scaled_gradients,
    scaled_lr,
    since,
)
from steadystep.faults.bits import flip

STEP = 3
Made = Callable[[nn.Module, torch.optim.Optimizer], Fault]

ALL: dict[str, Made] = {
    "bad-gradient": lambda model, _: bad_gradient(model, steps={STEP}),
    "scaled-gradients": lambda model, _: scaled_gradients(model, steps={STEP}, factor=10.0),
    "bad-loss": lambda *_: bad_loss(steps={STEP}),
    "drifting-loss": lambda *_: drifting_loss(start=STEP, per_step=0.5),
    "scaled-data": lambda *_: scaled_data(steps={STEP}, factor=1e20),
    "scaled-lr": lambda _, optimizer: scaled_lr(optimizer, steps={STEP}, factor=30.0),
    "creeping-lr": lambda _, optimizer: creeping_lr(optimizer, start=STEP),
    "flipped-bit": lambda model, _: flipped_bit(model, steps={STEP}),
}


class Loop:
    """A plain loop with a fault, that remembers what it saw."""

    def __init__(self, make: Made | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.fault = make(self.model, self.optimizer) if make else NO_FAULT
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.gradients: list[list[Tensor]] = []

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(step)
        return torch.randn(8, 4, generator=rng), torch.randn(8, 2, generator=rng)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def backward(self, step: int) -> float:
        batch = self.fault.batch(step, self.batch(step))
        self.optimizer.zero_grad()
        loss = self.fault.loss(step, self.loss(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def run(self, num_steps: int) -> "Loop":
        for step in range(num_steps):
            with self.fault.at(step):
                self.losses.append(self.backward(step))
                self.lrs.append(self.optimizer.param_groups[0]["lr"])
                self.gradients.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
                self.optimizer.step()
        return self

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Many short cases in one test: collecting garbage after each would take longer than all of them.
def test_nothing_happens_before_its_step() -> None:
    for name, make in ALL.items():
        loop = Loop(make)
        assert loop.fault.name == name
        assert same(loop.run(STEP).weights, Loop().run(STEP).weights), name


def test_computing_again_within_the_step_repeats_it() -> None:
    for name, make in ALL.items():
        loop = Loop(make)
        with loop.fault.at(STEP):
            seen = [(repr(loop.backward(STEP)), repr(loop.model[0].weight.grad)) for _ in range(2)]
        assert seen[0] == seen[1], name


def test_no_hook_and_no_rate_stays_behind() -> None:
    for name, make in ALL.items():
        loop = Loop(make).run(STEP + 2)
        assert not any(p._backward_hooks for p in loop.model.parameters()), name
        assert [group["lr"] for group in loop.optimizer.param_groups] == [0.1], name


def test_an_exception_leaves_nothing_behind_either() -> None:
    for name, make in ALL.items():
        loop = Loop(make)
        with pytest.raises(ZeroDivisionError), loop.fault.at(STEP):
            raise ZeroDivisionError
        assert not any(p._backward_hooks for p in loop.model.parameters()), name
        assert loop.optimizer.param_groups[0]["lr"] == 0.1, name


def test_after_its_step_gradients_are_right_again() -> None:
    for name in ("bad-gradient", "scaled-gradients", "bad-loss", "scaled-data"):
        loop, clean = Loop(ALL[name]), Loop()
        for each in (loop, clean):  # no updates, so that the two can be compared
            with each.fault.at(STEP):
                each.backward(STEP)
            with each.fault.at(STEP + 1):
                each.backward(STEP + 1)
        ours, theirs = ([p.grad for p in each.model.parameters() if p.grad is not None] for each in (loop, clean))
        assert same(ours, theirs), name


def test_one_element_of_one_gradient_goes_bad() -> None:
    loop = Loop(lambda model, _: bad_gradient(model, steps={STEP}, value=math.inf, parameter="2.weight", element=5))
    seen = loop.run(STEP + 1).gradients[STEP]
    bad = [(i, j) for i, g in enumerate(seen) for j, x in enumerate(g.flatten().tolist()) if not math.isfinite(x)]
    assert bad == [(2, 5)]
    assert seen[2].flatten()[5] == math.inf


def test_a_gradient_that_shares_its_memory_goes_bad_in_one_place_too() -> None:
    model = nn.Linear(3, 1)
    with bad_gradient(model, steps={0}, element=1).at(0):
        model.weight.sum().backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    assert model.weight.grad.isnan().tolist() == [[False, True, False]]


def test_the_default_is_a_nan() -> None:
    assert Loop(ALL["bad-gradient"]).run(STEP + 1).gradients[STEP][0].flatten()[0].isnan()


def test_all_gradients_are_scaled_and_the_loss_is_not() -> None:
    loop, clean = Loop(ALL["scaled-gradients"]).run(STEP + 1), Loop().run(STEP + 1)
    assert same(loop.gradients[STEP], [g * 10 for g in clean.gradients[STEP]])
    assert loop.losses == clean.losses


def test_a_frozen_parameter_is_left_alone() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    with scaled_gradients(model, steps={0}, factor=2.0).at(0):
        assert model.weight._backward_hooks
        assert not model.bias._backward_hooks


def test_a_bad_loss_spoils_its_gradients() -> None:
    loop = Loop(ALL["bad-loss"]).run(STEP + 1)
    assert [math.isnan(loss) for loss in loop.losses] == [False] * STEP + [True]
    assert all(g.isnan().all() for g in loop.gradients[STEP])


def test_a_drifting_loss_rises_in_even_steps_under_the_same_gradients() -> None:
    loop, clean = Loop(ALL["drifting-loss"]).run(STEP + 3), Loop().run(STEP + 3)
    above = [a - b for a, b in zip(loop.losses, clean.losses, strict=True)]
    assert above == pytest.approx([0.0] * STEP + [0.5, 1.0, 1.5])
    assert same(loop.weights, clean.weights)


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        (torch.ones(3), 0),
        ((torch.ones(3), torch.ones(2)), 1),
        ([torch.ones(3), torch.ones(2)], 0),
        ({"x": torch.ones(3), "y": torch.ones(2)}, "y"),
    ],
)
def test_one_part_of_any_batch_is_scaled_in_a_copy(batch: Any, part: int | str) -> None:
    fault = scaled_data(steps={STEP}, factor=1e6, part=part)
    assert fault.batch(STEP - 1, batch) is batch
    changed = fault.batch(STEP, batch)
    assert type(changed) is type(batch)
    tensors: Any = {0: batch} if isinstance(batch, Tensor) else batch
    results: Any = {0: changed} if isinstance(batch, Tensor) else changed
    keys = list(tensors) if isinstance(tensors, dict) else range(len(tensors))
    for key in keys:
        assert tensors[key].eq(1).all()
        assert results[key].eq(1e6 if key == part else 1).all()


@pytest.mark.parametrize("batch", [torch.ones(3, dtype=torch.long), ("text", torch.ones(1))])
def test_what_cannot_be_scaled_says_so(batch: Any) -> None:
    with pytest.raises(MisuseError, match="real numbers"):
        scaled_data(steps={0}, factor=2.0).batch(0, batch)


@pytest.mark.parametrize("key", ["z", 7])
def test_a_part_that_is_not_there_says_so(key: int | str) -> None:
    batch: Any = {"x": torch.ones(1)} if isinstance(key, str) else (torch.ones(1),)
    with pytest.raises(MisuseError, match="no part"):
        scaled_data(steps={0}, factor=2.0, part=key).batch(0, batch)


def test_the_rate_is_multiplied_for_as_long_as_told() -> None:
    loop = Loop(lambda _, optimizer: scaled_lr(optimizer, steps=range(2, 4), factor=30.0)).run(6)
    assert loop.lrs == pytest.approx([0.1, 0.1, 3.0, 3.0, 0.1, 0.1])


def test_for_good_means_for_good() -> None:
    assert 10**9 in since(5)
    assert 4 not in since(5)


def test_a_creeping_rate_compounds() -> None:
    loop = Loop(lambda _, optimizer: creeping_lr(optimizer, start=1, growth=1.1)).run(4)
    assert loop.lrs == pytest.approx([0.1, 0.11, 0.121, 0.1331])


def test_every_group_has_its_own_rate_put_back() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.7}])
    with scaled_lr(optimizer, steps={0}, factor=3.0).at(0):
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.3, 2.1])
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.7]


def test_a_rate_that_somebody_set_meanwhile_is_theirs() -> None:
    loop = Loop(ALL["scaled-lr"])
    with loop.fault.at(STEP):
        loop.optimizer.param_groups[0]["lr"] = 0.5
    assert loop.optimizer.param_groups[0]["lr"] == 0.5


@given(
    st.floats(min_value=2.0**-20, max_value=0.99) | st.floats(min_value=-0.99, max_value=-(2.0**-20)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_a_flipped_bit_makes_a_weight_huge_and_flips_back(value: float, dtype: torch.dtype) -> None:
    tensor = torch.full((2, 3), value, dtype=dtype).t()
    before = tensor.clone()
    flip(tensor, 4)
    # The top bit of an exponent of k bits is worth 2 ** 2 ** (k - 1); fp16 has 5.
    assert tensor[2, 0].abs() >= 2.0**-20 * (2.0**16 if dtype == torch.float16 else 2.0**127)
    assert tensor[2, 0] != before[2, 0]
    tensor[2, 0] = before[2, 0]
    assert torch.equal(tensor, before)
    flip(tensor, 4)
    flip(tensor, 4)
    assert torch.equal(tensor, before)


def test_a_chosen_bit_is_the_one_that_flips() -> None:
    tensor = torch.tensor([0.0, 1.0])
    flip(tensor, 1, bit=31)
    assert tensor.tolist() == [0.0, -1.0]


def test_a_flipped_bit_hits_one_weight_once() -> None:
    loop = Loop(lambda model, _: flipped_bit(model, steps={STEP}, parameter="2.weight", element=-1))
    before = loop.weights
    for step in range(STEP + 3):
        with loop.fault.at(step):
            pass
    changed = [int((a != b).sum()) for a, b in zip(before, loop.weights, strict=True)]
    assert changed == [0, 0, 1, 0]
    assert loop.weights[2].flatten()[-1].abs() > 1e30


def test_bits_of_other_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="int64"):
        flip(torch.ones(2, dtype=torch.long), 0)


@pytest.mark.parametrize("which", ["nope", 4, -5])
def test_a_parameter_that_is_not_there_says_so(which: str | int) -> None:
    with pytest.raises(MisuseError, match="no trainable parameter"):
        bad_gradient(Loop().model, steps={0}, parameter=which)


@pytest.mark.parametrize("name", ["bad-gradient", "bad-loss"])
def test_a_guard_meets_the_fault_and_refuses_it(name: str) -> None:
    loop = Loop(ALL[name])
    guard = steadystep.Guard(loop.model, loop.optimizer)
    stepped = []
    for step in range(STEP + 2):
        with loop.fault.at(step):
            closure = lambda batch, step=step: loop.fault.loss(step, loop.loss(batch))  # noqa: E731
            stepped.append(guard.step(closure, batch=loop.fault.batch(step, loop.batch(step))).stepped)
    guard.close()
    assert stepped == [True, True, True, False, True]
