"""Closures that all ranks run or none: whatever fails on one rank, every rank asks equally often."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.parallel import SingleProcess, messages, process_group
from steadystep.parallel.messages import ElsewhereError
from steadystep.parallel.process_group import ProcessGroup
from tests.unit.parallel.threads import Distributed, Seat, Wire, on_ranks

BATCH = torch.ones(3, 2)


def before(model: nn.Module, batch: Tensor) -> Tensor:
    raise KeyError


def after(model: nn.Module, batch: Tensor) -> Tensor:
    model(batch)
    raise KeyError


def parts_only(model: Any, batch: Tensor) -> Tensor:
    return nn.functional.linear(batch, model.weight).mean()


def twice(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) + model(batch)).mean()


def well(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What became of one closure per rank: "made", or the name of the error."""
    distributed = Distributed()
    monkeypatch.setattr(process_group, "dist", distributed)
    monkeypatch.setattr(messages, "dist", distributed)

    def act(*works: Callable[[Any, Tensor], Tensor]) -> list[str]:
        def one(seat: Seat) -> str:
            model = nn.Linear(2, 1)
            group, resharded = ProcessGroup(model, None, seat), []
            monkeypatch.setattr(group, "reshard", lambda: resharded.append(True))
            try:
                group.together(lambda batch: works[seat.rank](model, batch))(BATCH)
                found = "made"
            except ElsewhereError as error:
                found = type(error.__cause__ or error).__name__
            assert bool(resharded) is (found != "made")
            assert not model._forward_pre_hooks
            assert group.all(True)  # nobody is a question behind
            return found

        return on_ranks(distributed, Wire(len(works)), one)

    return act


@pytest.mark.parametrize("work", [well, twice, parts_only])
def test_where_all_is_well_it_is_made(made: Callable[..., list[str]], work: Callable[..., Tensor]) -> None:
    assert made(work, well) == ["made", "made"]


@pytest.mark.parametrize("work", [before, after])
@pytest.mark.parametrize("other", [well, twice, parts_only])
def test_what_fails_on_one_rank_is_made_by_none(
    made: Callable[..., list[str]], work: Callable[..., Tensor], other: Callable[..., Tensor]
) -> None:
    assert made(other, work, well) == ["ElsewhereError", "KeyError", "ElsewhereError"]


@pytest.mark.parametrize(("left", "right"), [(before, before), (after, after)])
def test_what_fails_on_all(
    made: Callable[..., list[str]], left: Callable[..., Tensor], right: Callable[..., Tensor]
) -> None:
    assert made(left, right) == ["KeyError", "KeyError"]


def test_failing_before_and_after_together(made: Callable[..., list[str]]) -> None:
    """Who fails before has told all; who would fail later is told on entering the model."""
    assert made(before, after) == ["KeyError", "ElsewhereError"]


def test_no_pass_is_begun_where_another_rank_failed_before(made: Callable[..., list[str]]) -> None:
    passes: list[int] = []

    def counted(model: nn.Module, batch: Tensor) -> Tensor:
        model.register_forward_hook(lambda *_: passes.append(1))
        return model(batch).mean()

    assert made(before, counted) == ["KeyError", "ElsewhereError"]
    assert passes == []
    assert made(after, counted) == ["KeyError", "ElsewhereError"]
    assert passes == [1]


def test_one_process_asks_nobody() -> None:
    def work() -> Tensor:
        return BATCH

    assert SingleProcess().together(work) is work
    assert SingleProcess().norms(["w"], [2.0]) == {"w": 2.0}
    assert SingleProcess().mean_loss([2.0]) == [2.0]
