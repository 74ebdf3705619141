"""Which ranks a model is trained by, and how a rank that fails tells the others."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from steadystep import parallel
from steadystep.errors import ConfigError, MisuseError
from steadystep.parallel import (
    Meeting,
    Once,
    SingleProcess,
    Through,
    process_group,
    ranks_and_model,
    ranks_of,
    without_ddp,
)


class Wrapper(nn.Module):
    """Stands for DistributedDataParallel."""

    def __init__(self, module: nn.Module, group: object = "own group") -> None:
        super().__init__()
        self.module = module
        self.process_group = group


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process group that is asked for its size only."""
    world = SimpleNamespace(available=True, initialized=True, sizes={None: 4, "own group": 2, "small": 1}, made=[])
    distributed = SimpleNamespace(
        is_available=lambda: world.available,
        is_initialized=lambda: world.initialized,
        get_world_size=lambda group=None: world.sizes[group],
    )
    monkeypatch.setattr(parallel.torch, "distributed", distributed)
    monkeypatch.setattr(parallel, "data_parallel_of", lambda model: model if isinstance(model, Wrapper) else None)
    monkeypatch.setattr(process_group, "ProcessGroup", lambda *what: ("ranks", *what))
    return world


class TestRanksOf:
    def test_all_ranks_of_the_default_group(self, world: Any) -> None:
        model = nn.Linear(1, 1)
        assert ranks_of(model) == ("ranks", model, None, None)

    def test_those_of_the_wrapper(self, world: Any) -> None:
        inner = nn.Linear(1, 1)
        model = Wrapper(inner)
        assert ranks_of(model) == ("ranks", inner, model, "own group")

    @pytest.mark.parametrize(("available", "initialized"), [(True, False), (False, True), (False, False)])
    def test_without_a_process_group_there_is_one(self, world: Any, available: bool, initialized: bool) -> None:
        world.available, world.initialized = available, initialized
        assert isinstance(ranks_of(nn.Linear(1, 1)), SingleProcess)

    def test_a_group_of_one_needs_no_agreement(self, world: Any) -> None:
        alone = ranks_of(Wrapper(nn.Linear(1, 1), "small"))
        assert isinstance(alone, SingleProcess)
        assert (alone.rank, alone.size, alone.sharded, alone.agreements) == (0, 1, False, 0)

    def test_stages_have_ranks_even_alone(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        stages = nn.Linear(1, 1)
        world.sizes[None] = 1  # a schedule runs backward by itself
        monkeypatch.setattr(parallel, "stages_of", lambda model: stages)
        assert ranks_of(nn.Linear(1, 1)) == ("ranks", stages, None, None)

    def test_the_model_inside(self, world: Any) -> None:
        inner = nn.Linear(1, 1)
        assert without_ddp(inner) is inner
        assert without_ddp(Wrapper(inner)) is inner
        assert without_ddp(Wrapper(Through(inner, lambda batch: batch))) is inner


def test_what_is_trained_is_the_model_or_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, ranks = nn.Linear(1, 1), SimpleNamespace(stages=None)
    monkeypatch.setattr(parallel, "ranks_of", lambda model: ranks)
    assert ranks_and_model(inner) == (ranks, inner)
    ranks.stages = nn.Linear(2, 2)
    assert ranks_and_model(inner) == (ranks, ranks.stages)


def test_through_computes_the_loss() -> None:
    through = Through(nn.Linear(1, 1), lambda batch: batch * 2)
    assert through(torch.tensor(3.0)).item() == 6.0
    assert len(list(through.parameters())) == 2


def test_once_is_asked_again_only_after_another_agreement() -> None:
    ranks, asked = SimpleNamespace(agreements=0), []

    def granted() -> bool:
        asked.append(ranks.agreements)
        return ranks.agreements != 2

    once = Once(ranks, granted)  # type: ignore[arg-type]
    heard = [once()]
    for _ in range(3):
        ranks.agreements += 1
        heard += [once(), once()]
    assert heard == [False, True, False, False, False, True, False]
    assert asked == [1, 2, 3]


class Listening:
    """Notes what is compared."""

    def __init__(self, answer: str = "") -> None:
        self.answer = answer
        self.heard: list[tuple[Any, str]] = []

    def compare(self, sections: Any, *, wrong: str = "") -> str:
        self.heard.append((sections, wrong))
        return self.answer


class TestMeeting:
    def test_a_difference_is_raised_in_the_same_words(self) -> None:
        ranks = Listening()
        Meeting().compare(ranks, {"settings": {"a": "1"}}, wrong="w")  # type: ignore[arg-type]
        assert ranks.heard == [({"settings": {"a": "1"}}, "w")]
        with pytest.raises(ConfigError, match="they differ"):
            Meeting().compare(Listening("they differ"), {})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("error", "wrong"), [(MisuseError("so it is"), "so it is"), (MisuseError(), "MisuseError")]
    )
    def test_a_mistake_of_one_rank_is_told_once(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, wrong: str
    ) -> None:
        ranks, model, meeting = Listening(), nn.Linear(1, 1), Meeting()
        found: list[Any] = []
        monkeypatch.setattr(parallel, "ranks_of", lambda model: found.append(model) or ranks)
        for _ in range(2):
            with pytest.raises(MisuseError), meeting.telling(model):
                raise error
        assert ranks.heard == [({}, wrong)]
        assert found == [model]

    def test_once_they_have_met_nobody_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks, meeting = Listening(), Meeting()
        monkeypatch.setattr(parallel, "ranks_of", lambda model: ranks)
        meeting.compare(ranks, {})  # type: ignore[arg-type]
        meeting.fail(nn.Linear(1, 1), MisuseError("later"))
        assert ranks.heard == [({}, "")]

    def test_errors_of_others_pass_by(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = Listening()
        monkeypatch.setattr(parallel, "ranks_of", lambda model: ranks)
        with pytest.raises(ZeroDivisionError), Meeting().telling(None):
            raise ZeroDivisionError
        with Meeting().telling(None):
            pass
        assert ranks.heard == []

    def test_what_is_no_model_leads_to_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def lost(model: Any) -> Any:
            raise AttributeError

        monkeypatch.setattr(parallel, "ranks_of", lost)
        Meeting().fail("no model", MisuseError("so it is"))
