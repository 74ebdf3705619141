"""One step: measured, then judged, then applied, then recorded; and what is left when it ends halfway."""

import logging
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.records import Finding, Signals

Event = tuple[str, int, int]


class Sees:
    """Finds nothing, and says when it is shown something."""

    name = "sees"

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def update(self, signals: Signals) -> tuple[Finding, ...]:
        self._tell("judge")
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Tells(torch.optim.SGD):
    """Says when it steps."""

    tell: Callable[[str], None]

    def step(self, closure: Any = None) -> Any:
        self.tell("apply")
        return super().step(closure)


class Hears(logging.Handler):
    """What is written down at once is a refused step."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell("record")


def told(values: list[float], *, accumulate: int = 1) -> list[list[Event]]:
    """By call of `step`: what happened, and how many attempts and updates the guard counted by then."""
    torch.manual_seed(0)
    model, events = nn.Linear(2, 1), []

    def tell(what: str) -> None:
        events[-1].append((what, guard.attempts, guard.updates))

    def loss(x: Tensor) -> Tensor:
        tell("measure")
        return model(x).square().mean()

    optimizer = Tells(model.parameters(), lr=0.1)
    optimizer.tell = tell
    config = {"training": {"gradient_accumulation_steps": accumulate}}
    guard = steadystep.Guard(model, optimizer, config=config, detectors=[Sees(tell)])
    handler, logger = Hears(tell), logging.getLogger("steadystep")
    logger.addHandler(handler)
    try:
        for value in values:
            events.append([])
            guard.step(loss, batch=torch.full((4, 2), value))
            tell("over")
    finally:
        logger.removeHandler(handler)
    return events


def test_a_step_is_measured_judged_applied_and_then_counted() -> None:
    first, second = told([1.0, 1.0])
    assert first == [("measure", 0, 0), ("judge", 0, 0), ("apply", 0, 0), ("over", 1, 1)]
    assert second == [("measure", 1, 1), ("judge", 1, 1), ("apply", 1, 1), ("over", 2, 2)]


def test_a_refused_step_is_recorded_and_never_applied() -> None:
    (refused,) = told([math.nan])
    named = [what for what, _, _ in refused]
    assert "apply" not in named
    assert named.index("judge") < named.index("record")
    assert refused[-2:] == [("record", 1, 0), ("over", 1, 0)]  # counted first: what is written down is over


def test_a_group_is_judged_once_and_its_bad_part_measured_again_before_it_is_applied() -> None:
    pending, stepped = told([math.nan, 1.0], accumulate=2)
    assert pending == [("measure", 0, 0), ("over", 0, 0)]
    named = [what for what, _, _ in stepped]
    assert named[:2] == ["measure", "judge"]
    assert set(named[2:-3]) == {"measure"}  # where the NaN came from, and the good one alone
    assert stepped[-3:] == [("apply", 0, 0), ("record", 1, 1), ("over", 1, 1)]


class Breaks(torch.optim.AdamW):
    """Raises at one of its calls, after the weights have changed."""

    calls: ClassVar = 0  # an attribute of its own would be rolled back

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        Breaks.calls += 1
        if Breaks.calls == 100:
            raise OSError("a disk is full")


def test_an_exception_in_a_replay_leaves_the_restored_state_and_its_count() -> None:
    torch.manual_seed(0)
    Breaks.calls = 0
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = Breaks(model.parameters(), lr=1e-2)
    guard, known = steadystep.Guard(model, optimizer), []

    def train(batches: list[Tensor]) -> None:
        for x in batches:
            if guard.attempts == 90:
                with torch.no_grad():
                    model[0].weight[0, 0] = math.nan
            known.append([p.detach().clone() for p in model.parameters()])
            guard.step(lambda x: (model(x).squeeze(-1) - x.sum(-1)).square().mean(), batch=x)

    with pytest.raises(OSError, match="a disk is full"):
        train([torch.randn(8, 4) for _ in range(100)])
    assert len(known) == 91  # ninety updates, and the rollback of the step after them
    assert Breaks.calls == 100  # the tenth of those that were replayed
    restored = guard.updates
    assert 0 < restored < 90
    assert int(optimizer.state[model[0].weight]["step"]) == restored
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), known[restored], strict=True))
    assert guard.step(lambda x: model(x).square().mean(), batch=torch.randn(8, 4)).stepped
    assert guard.updates == restored + 1
