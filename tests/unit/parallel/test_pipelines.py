"""The ranks of a pipeline as threads: each holds a stage, and all of them judge the whole model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from steadystep._utils.tensors import layout_of
from steadystep.errors import MisuseError
from steadystep.parallel import messages, process_group
from steadystep.parallel.messages import ElsewhereError
from steadystep.parallel.process_group import ProcessGroup
from steadystep.parallel.stages import Stages
from steadystep.records import Signals
from steadystep.signals.gradients import GradientView
from tests.unit.parallel.test_stages import Stage
from tests.unit.parallel.threads import Distributed, Seat, Wire, alike, on_ranks

Run = Callable[..., list[Any]]
EVERY = tuple(f"stage{i}.{each}" for i in range(3) for each in ("weight", "bias"))
NORMS = {name: 1.0 + place for place, name in enumerate(EVERY)}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a function once per rank; `stage_of` says which of the stages a rank has."""
    distributed = Distributed()
    monkeypatch.setattr(process_group, "dist", distributed)
    monkeypatch.setattr(messages, "dist", distributed)

    def act(work: Callable[[ProcessGroup], Any], stage_of: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
        def one(seat: Seat) -> Any:
            place = stage_of[seat.rank]
            return work(ProcessGroup(Stages([Stage(nn.Linear(2, 1), place, max(stage_of))]), None, seat))

        return on_ranks(distributed, Wire(len(stage_of)), one)

    return act


def watching(group: ProcessGroup, *, micro_batches: int = 1) -> ProcessGroup:
    assert group.stages is not None
    names = tuple(name for name, _ in group.stages.named_parameters())
    held: list[Any] = [(names, tuple(group.stages.parameters()))]
    vars(group)["held"] = held
    group.watch(lambda: held[0], [f"{group.stages.label}.mean"], micro_batches=micro_batches)
    return group


def agreed(group: ProcessGroup, loss: float = 6.0, **more: Any) -> Signals:
    names = vars(group)["held"][0][0]
    loss = loss if group.stages is not None and group.stages.has_loss else 0.0
    mine = Signals(step=7, loss=loss, losses=(loss,), grad_norm=1.0, lr=0.1, names=names)
    mine = replace(mine, norms=tuple(NORMS.get(name, 9.0) for name in names))
    return group.agree(GradientView(replace(mine, **more), [], layout_of([]), [])).signals


def test_every_rank_judges_all_stages(run: Run) -> None:
    def work(group: ProcessGroup) -> Signals:
        label = watching(group).stages.label  # type: ignore[union-attr]
        return agreed(group, buffers=(f"{label}.mean",), buffer_peaks=(2.0 + group.rank,))

    found = alike(run(work))
    assert (found.names, found.norms) == (EVERY, pytest.approx(tuple(NORMS.values())))
    assert (found.loss, found.losses) == (6.0, (6.0,))
    peaks = dict(zip(found.buffers, found.buffer_peaks, strict=True))
    assert peaks == {f"stage{i}.mean": pytest.approx(2.0 + i) for i in range(3)}


def test_replicas_of_a_stage_count_once(run: Run) -> None:
    def work(group: ProcessGroup) -> tuple[Signals, list[float], dict[str, float]]:
        watching(group)
        found = agreed(group, loss=float(group.rank))
        names = [name for name, _ in group.stages.named_parameters()]  # type: ignore[union-attr]
        has_loss = group.rank % 2  # stage 1
        return found, group.mean_loss([float(group.rank * has_loss)]), group.norms(names, [NORMS[n] for n in names])

    found, losses, norms = alike(run(work, (0, 1, 0, 1)))
    assert found.names == EVERY[:4]
    assert found.norms == pytest.approx([NORMS[name] for name in EVERY[:4]])
    assert (found.loss, losses) == (2.0, [2.0])  # of ranks 1 and 3
    assert norms == pytest.approx({name: NORMS[name] for name in EVERY[:4]})


def test_weights_of_stages_are_never_compared(run: Run) -> None:
    assert alike(run(lambda group: agreed(watching(group), step=40))).odd_replicas == ()
    assert all(run(lambda group: group.sharded))


def test_new_names_are_gathered_with_the_next_agreement(run: Run) -> None:
    def work(group: ProcessGroup) -> list[tuple[str, ...]]:
        held = vars(watching(group))["held"]
        found = [agreed(group).names]
        if group.rank == 1:
            names, parameters = held[0]
            held[0] = ("stage1.extra", *names[1:]), parameters
        return [*found, agreed(group).names, agreed(group).names]

    first, still, then = alike(run(work))
    assert first == EVERY
    assert still == tuple(name for name in EVERY if name != "stage1.weight")
    assert then == tuple(name.replace("stage1.weight", "stage1.extra") for name in EVERY)


def test_a_loss_that_nobody_has_said_is_refused_on_all_once(run: Run) -> None:
    def work(group: ProcessGroup) -> float:
        stages = watching(group).stages
        assert stages is not None
        stages.given([])
        with pytest.raises(MisuseError, match="no rank has the loss"):
            agreed(group)
        assert not stages.lacks_loss
        return agreed(group).loss

    assert alike(run(work)) == 6.0


def test_a_schedule_is_run_by_all_or_by_none(run: Run) -> None:
    def work(group: ProcessGroup, *, failing: int | None = None) -> float | str:
        stages = group.stages
        assert stages is not None

        def schedule(batch: torch.Tensor) -> torch.Tensor:
            if group.rank == failing:
                raise KeyError
            stages._stages[0].clear_runtime_states()
            return batch.mean()

        try:
            return float(group.together(schedule)(torch.tensor([2.0, 4.0])))
        except ElsewhereError:
            return "called off"

    assert run(work) == [0.0, 0.0, 3.0]
    assert run(lambda group: work(group, failing=1)) == ["called off"] * 3
