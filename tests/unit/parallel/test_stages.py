"""Stages of a pipeline: found by their modules, named by their number, one payload for parameters that differ."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadystep.config import Config
from steadystep.errors import MisuseError
from steadystep.parallel import stages as found_in
from steadystep.parallel.messages import sections
from steadystep.parallel.payload import PayloadLayout, decode, encode
from steadystep.parallel.stages import Stages, by_stage, stages_of
from steadystep.records import Signals


class Stage:
    """What is used of torch's."""

    def __init__(self, submod: nn.Module, stage_index: int, last: int) -> None:
        self.submod, self.stage_index, self.is_last = submod, stage_index, stage_index == last
        self.cleared = 0

    def clear_runtime_states(self) -> None:
        self.cleared += 1


@pytest.fixture
def pipelining(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_PipelineStageBase=Stage)
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining.stage", module)


@pytest.mark.usefixtures("pipelining")
def test_found_by_their_modules_and_named_by_their_number() -> None:
    parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])
    assert stages_of(parts) is None
    held = [Stage(parts[1], 3, 3), Stage(parts[0], 1, 3), Stage(nn.Linear(1, 1), 0, 3)]
    stages = stages_of(parts)
    assert stages is not None
    assert [name for name, _ in stages.named_parameters()] == [
        "stage1.weight",
        "stage1.bias",
        "stage3.weight",
        "stage3.bias",
    ]
    assert (stages.label, stages.has_loss) == ("stage1 and stage3", True)
    first = stages_of(held[2].submod)
    assert first is not None
    assert not first.has_loss
    assert stages_of("no model") is None


@pytest.mark.usefixtures("pipelining")
def test_a_stage_inside_of_ddp_is_known_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setattr(found_in, "DistributedDataParallel", Wrapper)
    inner = nn.Linear(2, 1)
    held = [Stage(Wrapper(inner), 1, 1)]
    for model in (inner, held[0].submod, nn.Sequential(inner)):
        stages = stages_of(model)
        assert stages is not None
        assert [name for name, _ in stages.named_parameters()] == ["stage1.weight", "stage1.bias"]
    assert stages_of(nn.Linear(2, 1)) is None


def test_names_in_the_order_of_their_stages() -> None:
    names = ["other.a", "stage10.a", "stage2.b", "stage2.a", "stage2.b", "stage.a"]
    assert by_stage(names) == ("stage2.b", "stage2.a", "stage10.a", "other.a", "stage.a")


def test_of_stages_ranks_compare_what_they_share() -> None:
    stages = Stages([Stage(nn.BatchNorm1d(2), 0, 0)])
    found = sections(Config.load(None), stages, torch.optim.SGD(stages.parameters(), lr=0.1))
    assert found["parameters"] == found["buffers"] == {}
    assert "group 0 parameters" not in found["optimizer"]
    assert found["optimizer"]["group 0 lr"] == "0.1"


def test_the_loss_is_that_of_the_last_stage() -> None:
    first, last = Stages([Stage(nn.Linear(1, 1), 0, 1)]), Stages([Stage(nn.Linear(1, 1), 1, 1)])
    assert first.loss(None).item() == first.loss(torch.tensor(3.0)).item() == 0.0
    loss = last.loss(torch.tensor([3.0], requires_grad=True))
    assert (loss.item(), loss.dim(), loss.requires_grad) == (3.0, 0, False)
    for wrong in (None, 3.0, torch.ones(2)):
        with pytest.raises(MisuseError, match="last stage"):
            last.loss(wrong)


def test_the_loss_that_the_loop_has_said() -> None:
    first, last = Stages([Stage(nn.Linear(1, 1), 0, 1)]), Stages([Stage(nn.Linear(1, 1), 1, 1)])
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    assert (first.given(losses).item(), first.lacks_loss) == (0.0, False)
    assert (first.given([]).item(), first.lacks_loss) == (0.0, False)
    assert (last.given([]).item(), last.lacks_loss) == (0.0, True)
    assert (last.given(losses).item(), last.lacks_loss) == (2.5, False)


def test_who_listens_is_told_before_a_stage_runs_and_leaves_nothing() -> None:
    held = Stage(nn.Linear(1, 1), 0, 0)
    before = dict(vars(held))
    told: list[int] = []
    handle = Stages([held]).when_entered(lambda: told.append(held.cleared))
    held.clear_runtime_states()
    handle.remove()
    held.clear_runtime_states()
    assert (told, held.cleared) == ([0], 2)
    assert vars(held) == before | {"cleared": 2}


numbers = st.floats(0.0, 1e6)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=4), st.data())
def test_a_payload_of_stages(norms: list[tuple[float, float]], data: Any) -> None:
    """Each rank has two parameters of its own, the last one the loss: every rank decodes all of them."""
    size = len(norms)
    names = tuple(f"stage{i}.{each}" for i in range(size) for each in "ab")
    missing = data.draw(st.integers(0, size - 1))  # a parameter without a gradient
    held = [{f"stage{i}.a": a} | ({} if i == missing else {f"stage{i}.b": b}) for i, (a, b) in enumerate(norms)]
    loss = data.draw(st.one_of(numbers, st.just(math.nan)))
    forms = [
        PayloadLayout(
            rank=i,
            size=size,
            names=names,
            buffers=(),
            micro_batches=1,
            questions=0,
            pipelined=True,
            has_loss=i == size - 1,
        )
        for i in range(size)
    ]
    seen = [signals(loss if i == size - 1 else 0.0, held[i]) for i in range(size)]
    payloads = [encode(forms[i], seen[i], copies=dict.fromkeys(held[i], 1.0)) for i in range(size)]
    sums = [sum(column) for column in zip(*payloads, strict=True)]
    found = [decode(forms[i], sums, seen[i]) for i in range(size)]
    for agreed in found:
        agreed.check(rank=0, step=0)
        assert repr(agreed.signals) == repr(found[0].signals)
        assert agreed.signals.names == tuple(name for name in names if name != f"stage{missing}.b")
        assert agreed.signals.norms == pytest.approx([held[int(n[5])][n] for n in agreed.signals.names])
        assert repr(agreed.signals.loss) == repr(loss)


def test_nobody_has_the_loss() -> None:
    form = PayloadLayout(
        rank=0, size=1, names=("stage0.a",), buffers=(), micro_batches=1, questions=0, pipelined=True, has_loss=False
    )
    mine = signals(0.0, {"stage0.a": 1.0})
    agreed = decode(form, encode(form, mine, copies={"stage0.a": 1.0}), mine)
    with pytest.raises(MisuseError, match=r"watcher.loss\(loss\)"):
        agreed.check(rank=0, step=0)


def signals(loss: float, norms: dict[str, float]) -> Signals:
    return Signals(
        step=0,
        loss=loss,
        losses=(loss,),
        grad_norm=math.hypot(*norms.values()),
        lr=0.1,
        names=tuple(norms),
        norms=tuple(norms.values()),
    )
