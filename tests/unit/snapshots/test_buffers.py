"""Which buffers count, however they are written."""

import math

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.snapshots.buffers import Buffers


class Writer(nn.Module):
    """A layer with one buffer that is written in a given manner on every forward pass."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.manner = manner
        self.value = 1.0
        self.active = True
        self.register_buffer("state", torch.zeros(4))
        self.register_buffer("mask", torch.full((2, 2), -math.inf))
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.active:
            if self.manner == "in-place":
                self.state.add_(self.value)
            elif self.manner == "through .data":
                self.state.data.add_(self.value)
                return self.linear(x).sum()  # nothing here moves a version counter
            elif self.manner == "replaced":
                self.state = self.state + self.value
            self.counter += 1
        return self.linear(x).sum()


MANNERS = ["in-place", "through .data", "replaced"]


def guarded(model: nn.Module) -> steadystep.Guard:
    return steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))


@pytest.mark.parametrize("style", ["closure", "loss"])
@pytest.mark.parametrize("manner", MANNERS)
def test_a_refused_step_puts_the_buffer_back(manner: str, style: str) -> None:
    model = Writer(manner)
    guard = guarded(model)
    x = torch.ones(1, 3)

    def step(factor: float) -> steadystep.Outcome:
        return guard.step(model(x) * factor if style == "loss" else lambda: model(x) * factor)

    for _ in range(5):
        assert step(1.0).stepped
    for _ in range(3):
        assert not step(math.nan).stepped
        assert model.state.tolist() == [5.0] * 4
        assert model.counter.item() == (0 if manner == "through .data" else 5)
    assert step(1.0).stepped
    assert model.state.tolist() == [6.0] * 4


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("manner", MANNERS)
def test_a_buffer_that_turns_non_finite_is_seen(manner: str, value: float) -> None:
    model = Writer(manner)
    guard = guarded(model)
    x = torch.ones(1, 3)
    for _ in range(40):
        guard.step(lambda: model(x))
    model.value = value
    outcome = guard.step(lambda: model(x))
    assert not outcome.stepped
    assert outcome.signals.bad_buffers == ("state",)
    assert model.state.tolist() == [40.0] * 4


def test_a_buffer_born_infinite_is_never_judged() -> None:
    model = Writer("in-place")
    model.mask.fill_(-math.inf)
    guard = guarded(model)
    x = torch.ones(1, 3)

    def rewrite() -> Tensor:
        model.mask.fill_(-math.inf)
        return model(x)

    assert all(guard.step(rewrite).stepped for _ in range(5))


def test_a_cache_that_grows_is_no_statistic() -> None:
    model = Writer("in-place")
    guard = guarded(model)
    x = torch.ones(1, 3)

    def grow(n: int) -> Tensor:
        model.state = torch.full((n,), -math.inf)
        model.active = False
        return model(x)

    assert all(guard.step(lambda n=n: grow(n)).stepped for n in (5, 6, 7, 7, 7, 8, 8))


def test_a_cache_that_grew_once_is_not_judged_later() -> None:
    model = Writer("in-place")
    model.active = False
    guard = guarded(model)
    x = torch.ones(1, 3)

    def fill(n: int, value: float) -> Tensor:
        model.state = torch.full((n,), value)
        return model(x)

    for n, value in ((5, 0.0), (6, 0.0), (6, 0.0), (6, -math.inf), (6, 0.0)):
        assert guard.step(lambda n=n, value=value: fill(n, value)).stepped


def test_a_quiet_module_that_wakes_up_is_noticed_and_put_back() -> None:
    """BatchNorm's running statistics do not move their version counter; its batch counter does."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.eval()
    guard = guarded(model)
    x = torch.randn(6, 3)
    for _ in range(20):
        guard.step(lambda: model(x).mean())
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert not guard.step(lambda: model(x * math.nan).mean()).stepped
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    outcome = guard.step(lambda: model(x * 1e25).mean() * 1e-3)
    assert outcome.signals.bad_buffers == ("0.running_var",)


def test_what_the_user_changes_between_steps_stays() -> None:
    model = Writer("in-place")
    guard = guarded(model)
    x = torch.ones(1, 3)
    for _ in range(4):
        guard.step(lambda: model(x))
    model.state.fill_(100.0)
    assert not guard.step(lambda: model(x) * math.nan).stepped
    assert model.state.tolist() == [100.0] * 4


def test_constants_are_not_copied_again_and_again() -> None:
    model = Writer("in-place")
    model.active = False
    buffers = Buffers(model)
    for step in range(3):
        buffers.remember()
        buffers.learn([float(flag) for flag in buffers.probe(step)] or [0.0])
    assert buffers.suspects() == ([], [])
    model.active = True
    model(torch.ones(1, 3))
    assert buffers.suspects()[0] == ["state"]


def test_probes_thin_out() -> None:
    buffers = Buffers(nn.BatchNorm1d(2))
    due = [step for step in range(5000) if buffers.probe(step)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


def test_a_model_without_buffers_costs_nothing() -> None:
    buffers = Buffers(nn.Linear(2, 2))
    buffers.remember()
    buffers.put_back()
    assert buffers.suspects() == ([], [])
    assert buffers.probe(0) == []
