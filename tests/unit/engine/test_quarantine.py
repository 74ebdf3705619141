"""Batches that were bad for a while: their updates are undone, the others replayed, and a list is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from steadystep.errors import MisuseError
from steadystep.lab.tasks import TASKS
from steadystep.records import Outcome, Quarantined

STEPS, FIRST, LENGTH = 132, 90, 16

Batch = tuple[Tensor, Tensor]
Spoil = Callable[[Batch], Batch]


def data(spoil: Spoil) -> list[Batch]:
    made = []
    for step in range(STEPS):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
        batch = x, x.sum(-1, keepdim=True)
        made.append(spoil(batch) if FIRST <= step < FIRST + LENGTH else batch)
    return made


def train(
    spoil: Spoil, *, without: tuple[int, ...] = (), run_dir: Path | None = None, **config: Any
) -> tuple[steadystep.Guard, nn.Module, list[Outcome]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=0.01), config=config, run_dir=run_dir)

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    outcomes = [guard.step(loss, batch=batch) for batch in guard.batches(data(spoil), skip=without)]
    return guard, model, outcomes


def constant(batch: Batch) -> Batch:
    return torch.zeros_like(batch[0]), batch[1]


def wrong_labels(batch: Batch) -> Batch:
    return batch[0], 3.0 - 4.0 * batch[1]


def untouched(batch: Batch) -> Batch:
    return batch


def test_bad_batches_are_undone_and_the_run_is_the_one_that_never_saw_them() -> None:
    guard, model, outcomes = train(constant)
    (back,) = [outcome for outcome in outcomes if outcome.restored is not None]
    steps = [each.step for each in back.quarantined]
    assert set(range(FIRST + 1, FIRST + LENGTH)) <= set(steps) <= set(range(FIRST, FIRST + LENGTH))
    assert back.plan.actions == ("rollback", "replay", "skip-batches")
    assert back.diagnosis.cause == "repeated-batch"
    assert guard.updates == STEPS - len(steps)
    assert [each.batches for each in guard.quarantined] == [(step,) for step in steps]
    _, possible, _ = train(constant, without=tuple(steps))
    for mine, best in zip(model.parameters(), possible.parameters(), strict=True):
        assert torch.equal(mine, best)


def test_wrong_labels_for_a_while() -> None:
    task = TASKS["regression"].make(0)
    guard = steadystep.Guard(task.model, task.optimizer)
    outcomes = []
    for step in range(232):
        x, y = task.batch()
        outcomes.append(guard.step(task.loss, batch=(x, y.flip(0) if 200 <= step < 220 else y)))
    (back,) = [outcome for outcome in outcomes if outcome.restored is not None]
    assert {each.step for each in back.quarantined} == set(range(200, 220))
    assert back.diagnosis.cause == "bad-batch"
    assert back.plan.lr is None
    assert guard.updates == 232 - 20


def test_the_list_survives_a_resume_and_is_in_the_log(tmp_path: Path) -> None:
    guard, _, _ = train(constant, run_dir=tmp_path)
    saved = json.loads(json.dumps(guard.state_dict()))
    guard.close()
    other = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    again = steadystep.Guard(other, torch.optim.Adam(other.parameters(), lr=0.01))
    again.load_state_dict(saved)
    assert again.quarantined == guard.quarantined != ()
    assert isinstance(again.quarantined[0], Quarantined)
    run = steadystep.read_run(tmp_path)
    logged = [each for incident in run.incidents for each in incident.quarantined]
    assert tuple(logged) == guard.quarantined
    told = run.effective()
    assert told.updates == guard.updates
    assert told.steps - told.updates == len(logged)
    (cost,) = told.incidents
    assert cost.quarantined == tuple(each.step for each in logged)
    assert cost.seconds is not None
    assert run.numbers()["effective_share"] == told.updates / (told.steps + cost.replayed)


def test_a_refused_batch_is_listed_too() -> None:
    def infinite(batch: Batch) -> Batch:
        return batch[0] * 1e20, batch[1]  # tanh hides it from the loss

    guard, _, outcomes = train(infinite)
    refused = [outcome.step for outcome in outcomes if not outcome.stepped and outcome.restored is None]
    assert refused[:1] == [FIRST]
    assert [each.step for each in guard.quarantined][:1] == [FIRST]
    assert guard.quarantined[0].cause == "bad-batch"


def test_nothing_is_in_quarantine_in_a_healthy_run_or_where_it_only_watches() -> None:
    assert train(untouched)[0].quarantined == ()
    assert train(constant, mode="observe")[0].quarantined == ()


def test_harder_data_that_stays_is_no_fault() -> None:
    """Another world from one step on: nothing is undone, whatever the loss says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=0.01))

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    worlds = [wrong_labels(batch) if step >= FIRST else batch for step, batch in enumerate(data(untouched))]
    outcomes = [guard.step(loss, batch=batch) for batch in worlds]
    assert all(outcome.restored is None for outcome in outcomes)
    assert guard.quarantined == ()


def test_without_replay_nothing_is_undone() -> None:
    """What came after the bad batches would be lost with them."""
    guard, _, outcomes = train(constant, recovery={"replay_memory_mb": 0})
    assert all(outcome.restored is None for outcome in outcomes)
    assert guard.quarantined == ()


@pytest.mark.parametrize("skip", [["a"], [-1], "12", 3, [True]])
def test_numbers_of_batches_are_checked(skip: Any) -> None:
    model = nn.Linear(1, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(MisuseError, match="numbers of batches"):
        guard.batches([1, 2], skip=skip)
