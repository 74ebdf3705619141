"""What keeps a step cheap: less is asked for, and the answers are the same."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep._utils.tensors import peaks
from steadystep.config import Config
from steadystep.detectors.build import build_detectors
from steadystep.engine.closures import BatchClosure
from steadystep.records import Finding, Signals
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate, ReplayBuffer
from steadystep.watching.listeners import may_nest
from tests.loops import batches, squared


def test_a_detector_without_what_it_needs_is_unmoved() -> None:
    needy = [detector for detector in build_detectors(Config()) if getattr(detector, "needs", "")]
    wanted = {"metrics", "batch_rms", "buffer_peaks", "odd_replicas", "bit_flips", "miscomputations"}
    assert {detector.needs for detector in needy} == wanted  # type: ignore[attr-defined]
    for detector in needy:
        before = detector.state_dict()
        for step, loss in enumerate((1.0, math.nan, 1e9)):
            assert detector.update(Signals(step=step, loss=loss, grad_norm=loss)) == ()
        assert detector.state_dict() == before


class Counts:
    """Remembers the steps it was asked at."""

    def __init__(self, needs: str) -> None:
        self.name, self.needs = f"counts {needs}", needs
        self.steps: list[int] = []

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        self.steps.append(signals.step)
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_detector_is_asked_where_it_has_something_to_look_at() -> None:
    model = nn.Linear(6, 1)
    asked = [Counts(needs) for needs in ("", "metrics", "batch_rms")]
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), detectors=asked)
    for step, x in enumerate(batches(12)):
        x = torch.zeros_like(x) if step == 7 else x  # why: a size of 0 is a size
        metrics = {"reward": 1.0} if step % 3 == 0 else None
        batch = x if step >= 6 else None
        guard.step(lambda x=x: squared(model, x), metrics=metrics) if batch is None else guard.step(
            lambda x: squared(model, x), batch=batch, metrics=metrics
        )
    assert asked[0].steps == list(range(12))
    without_probe = set(range(12)) - {2, 3, 5, 9}  # where there is a probe, all are asked
    assert [step for step in asked[1].steps if step in without_probe] == [0, 6]
    assert [step for step in asked[2].steps if step in without_probe] == [6, 7, 8, 10, 11]


def done(updates: int, elements: int) -> RecordedUpdate:
    work = RecordedMicroBatch(BatchClosure(lambda x: x, torch.zeros(elements), None), None)
    return RecordedUpdate((work,), Signals(step=updates, loss=1.0, grad_norm=1.0), ({"lr": 0.1},), updates=updates)


def test_batches_that_fit_many_times_are_weighed_together_and_others_at_once() -> None:
    small = ReplayBuffer(max_bytes=4 * 100.0)
    for number in range(1, 101):
        small.add(done(number, elements=1))
        assert small.open
    small.add(done(101, elements=1))  # one more than there is room for, and no batch has been larger
    assert not small.open
    assert small.since(0, until=101) == ()


@pytest.mark.parametrize("before", [1, 5, 16, 40])
def test_a_batch_that_is_suddenly_too_large_is_noticed_soon(before: int) -> None:
    replay_buffer, number = ReplayBuffer(max_bytes=4 * 1000.0), 0
    for number in range(1, before + 1):
        replay_buffer.add(done(number, elements=1))
    added = 0
    while replay_buffer.open:
        added += 1
        replay_buffer.add(done(number + added, elements=2000))
    assert added <= 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_peaks_are_those_of_the_infinity_norm(dtype: torch.dtype) -> None:
    numbers: list[Tensor] = [torch.randn(3, 5), torch.tensor([-7.0, 2.0]), torch.tensor([math.nan, 1.0])]
    numbers += [torch.tensor([-math.inf, 1.0]), torch.tensor(3.0), torch.zeros(2)]
    large = torch.rand(4, 30, 40)  # all above zero, all below, and with what is not finite
    numbers[2:2] = [large[0], -large[1], large[2].index_fill(0, torch.tensor([7]), math.nan)]
    numbers.append(large[3].index_fill(1, torch.tensor([7]), -math.inf))
    held = [tensor.to(dtype) for tensor in numbers] + [torch.tensor([1.0, -2.0])]
    expected = torch.stack([norm.double() for norm in torch._foreach_norm(held, torch.inf)])
    assert torch.equal(torch.stack([peak.double() for peak in peaks(held)]).nan_to_num(-1.0), expected.nan_to_num(-1.0))


class Calls(torch.optim.AdamW):
    """Its step is another one, around the one it inherits."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return super().step(closure)


class Inherits(torch.optim.AdamW):
    """Its step is the one it inherits; torch wraps that anew."""


@pytest.mark.parametrize(("kind", "nests"), [(torch.optim.AdamW, False), (Inherits, False), (Calls, True)])
def test_only_a_step_around_a_step_nests(kind: type[torch.optim.AdamW], nests: bool) -> None:
    model = nn.Linear(6, 1)
    optimizer = kind(model.parameters(), lr=0.01)
    assert may_nest(optimizer) is nests
    with steadystep.watch(model, optimizer) as watcher:
        for x in batches(3):
            optimizer.zero_grad()
            squared(model, x).backward()
            optimizer.step()
        assert watcher.guard.attempts == 3
