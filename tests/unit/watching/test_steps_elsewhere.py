"""A loop that never calls `step` of the optimizer it gave: nothing is guarded, and that is said once."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Optimizer

import steadystep
from tests.loops import assert_same, batches, small_net, squared


class TwoPasses(Optimizer):
    """Climbs, goes back and steps with the second gradient (Foret 2021), as often written: `step` is not called."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.01})  # type: ignore[arg-type]
        self.base = SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["old"]
        self.base.step()
        self.zero_grad()


def trained(watched: Callable[[TwoPasses], list[Optimizer]], steps: int = 30) -> tuple[torch.nn.Module, list[int]]:
    model = small_net(dropout=0.0)
    optimizer = TwoPasses(model.parameters())
    watchers = [steadystep.watch(model, each) for each in watched(optimizer)]
    for x in batches(steps):
        squared(model, x).backward()
        optimizer.first_step()
        squared(model, x).backward()
        optimizer.second_step()
    updates = [watcher.guard.updates for watcher in watchers]
    for watcher in watchers:
        watcher.remove()
    return model, updates


def test_it_is_said_once_and_names_the_optimizer_to_watch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="steadystep")
    plain, _ = trained(lambda optimizer: [])
    model, updates = trained(lambda optimizer: [optimizer])
    assert updates == [0]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "TwoPasses.step() has not been called: these updates are not guarded" in said
    assert said.endswith("watch(model, optimizer.base)")
    assert_same(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize("inner", [lambda one: [one.base], lambda one: [one, one.base]])
def test_the_inner_one_is_guarded(
    inner: Callable[[TwoPasses], list[Optimizer]], caplog: pytest.LogCaptureFixture
) -> None:
    """Where another guard has these weights there is nothing to say."""
    caplog.set_level(logging.WARNING, logger="steadystep")
    plain, _ = trained(lambda optimizer: [])
    model, updates = trained(inner)
    assert updates[-1] == 30
    assert caplog.records == []
    assert_same(plain.state_dict(), model.state_dict())


def test_many_micro_batches_before_the_first_step_are_no_updates(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="steadystep")
    model = small_net(dropout=0.0)
    optimizer = SGD(model.parameters(), lr=0.01)
    with steadystep.watch(model, optimizer) as watcher:
        for x in batches(40):
            squared(model, x).backward()
        optimizer.step()
        assert watcher.guard.updates == 1
    assert caplog.records == []
