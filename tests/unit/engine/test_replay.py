"""After a rollback the batches since are run again: what a flipped bit cost is nothing at all."""

import functools
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep._utils.tree import bytes_of, size_of
from steadystep.engine.closures import BatchClosure
from steadystep.lab.tasks import TASKS
from steadystep.records import Outcome, Signals
from steadystep.snapshots.replay_buffer import RecordedMicroBatch, RecordedUpdate, ReplayBuffer
from tests.loops import assert_same, full_state

STEPS = 110
Change = Callable[[nn.Module, int], None]


class Net(nn.Module):
    """Dropout, BatchNorm, and an embedding of which most rows are never used."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.table(x[:, 0].long()) + x[:, 1:])


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 5, (count, 24, 1), generator=generator).float()
    return list(torch.cat([rows, torch.randn(count, 24, 8, generator=generator)], dim=2))


def train(
    change: Change | None = None,
    *,
    optimizer: str = "AdamW",
    config: dict[str, Any] | None = None,
    around: Callable[[int], AbstractContextManager[None]] | None = None,
    as_batch: bool = True,
    settle: bool = True,
    steps: int = STEPS,
) -> tuple[dict[str, Any], steadystep.Guard, list[Outcome]]:
    torch.manual_seed(0)
    model = Net()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    guard = steadystep.Guard(model, made, config=config)
    outcomes = []
    for step, x in enumerate(batches(steps)):
        torch.manual_seed(1000 + step)  # the loop draws random numbers of its own
        if change is not None:
            change(model, step)
        with around(step) if around is not None else nullcontext():

            def loss(x: Tensor) -> Tensor:
                return (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean()

            outcomes.append(guard.step(loss, batch=x) if as_batch else guard.step(lambda x=x, f=loss: f(x)))
    state = full_state(model, made)
    guard.close()
    return state, guard, outcomes


def damaged(at: int, damage: Callable[[nn.Module], None]) -> Change:
    def change(model: nn.Module, step: int) -> None:
        if step == at:
            with torch.no_grad():
                damage(model)

    return change


def nan_weight(model: nn.Module) -> None:
    model.body[0].weight[3, 2] = math.nan


def unused_row(model: nn.Module) -> None:
    model.table.weight[40] = math.inf


def zeroed(model: nn.Module) -> None:
    model.body[0].weight.zero_()


def huge(model: nn.Module) -> None:
    model.body[4].weight[0, 5] = 1e30


@functools.cache
def undamaged() -> Any:
    return train()


@pytest.mark.parametrize(
    ("damage", "at"), [(nan_weight, 70), (nan_weight, 83), (unused_row, 83), (zeroed, 70), (huge, 83)]
)
def test_damage_from_outside_costs_nothing(damage: Callable[[nn.Module], None], at: int) -> None:
    expected, whole, _ = undamaged()
    got, guard, outcomes = train(damaged(at, damage))
    (back,) = [outcome for outcome in outcomes if outcome.plan.actions]
    assert back.plan.actions == ("rollback", "replay")
    assert back.restored == back.step + 1  # the batch at hand was made up for as well
    assert guard.updates == whole.updates == STEPS
    assert_same(got, expected)


@settings(max_examples=8)
@given(at=st.integers(62, 100), optimizer=st.sampled_from(["AdamW", "SGD", "RMSprop"]), size=st.sampled_from([1, 2]))
@pytest.mark.slow
def test_whenever_it_happens_it_ends_with_the_same_bits(at: int, optimizer: str, size: int) -> None:
    config = {"training": {"gradient_accumulation_steps": size, "max_grad_norm": 1.0}}
    steps = STEPS * size
    expected, whole, _ = train(optimizer=optimizer, config=config, steps=steps)
    got, guard, outcomes = train(damaged(at * size, nan_weight), optimizer=optimizer, config=config, steps=steps)
    assert any(outcome.replayed for outcome in outcomes)
    assert guard.updates == whole.updates
    assert_same(got, expected)


def test_moments_that_were_poisoned_are_made_again_without_the_poison() -> None:
    expected, _, _ = train(steps=160)
    torch.manual_seed(0)
    model = Net()
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = steadystep.Guard(model, made)
    outcomes = []
    for step, x in enumerate(batches(160)):
        torch.manual_seed(1000 + step)
        if step == 90:
            for held in made.state.values():
                held["exp_avg"].mul_(1e5)
        outcomes.append(guard.step(lambda x: (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean(), batch=x))
    back = next(outcome for outcome in outcomes if outcome.restored is not None)
    assert back.replayed > 0
    assert back.plan.actions == ("rollback", "replay")
    assert guard.updates >= 150  # a few were refused before the cause was clear
    lost = sum(p.detach().sub(expected[f"model.{name}"]).square().sum() for name, p in model.named_parameters())
    assert (
        lost.sqrt() < 0.1 * sum(expected[f"model.{name}"].square().sum() for name, _ in model.named_parameters()).sqrt()
    )


def test_a_closure_that_reads_something_else_by_now_is_not_run_again() -> None:
    """The first one tells: it starts from the very same state and must give the very same loss."""
    torch.manual_seed(0)
    model = Net()
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    static = torch.zeros(24, 9)
    outcomes = []
    for step, x in enumerate(batches(STEPS)):
        static.copy_(x)  # as loops do that were made for CUDA graphs
        if step == 80:
            with torch.no_grad():
                nan_weight(model)
        outcomes.append(guard.step(lambda x: (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean(), batch=static))
    (back,) = [outcome for outcome in outcomes if outcome.restored is not None]
    assert back.replayed == 0
    assert back.plan.actions == ("rollback", "skip-batches")
    assert back.plan.lr is None  # no learning rate did that
    assert back.restored <= 61
    assert all(p.isfinite().all() for p in model.parameters())


def test_without_batches_there_is_nothing_to_run_again() -> None:
    _, guard, outcomes = train(damaged(80, nan_weight), as_batch=False)
    (back,) = [outcome for outcome in outcomes if outcome.restored is not None]
    assert "replay" not in back.plan.actions
    assert guard.updates < STEPS - 20


def test_batches_that_are_too_large_are_not_remembered() -> None:
    for megabytes, caught in ((0, False), (0.01, False), (1.0, True)):  # a batch has 864 bytes, and over 40 are kept
        config = {"recovery": {"replay_memory_mb": megabytes}}
        _, guard, outcomes = train(damaged(80, nan_weight), config=config)
        assert any(outcome.replayed for outcome in outcomes) == caught
        assert guard._recovery.remembers == caught


def test_what_the_updates_themselves_did_is_not_made_again() -> None:
    """A learning rate that is too high: up to the first sign, and no further; and it is lowered."""

    def raise_rate(model: nn.Module, step: int) -> None:
        made[0].param_groups[0]["lr"] = 0.01 * (1.0 if step < 80 else 1.06 ** (step - 80))

    torch.manual_seed(0)
    model = Net(dropout=0.0)
    made = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]
    guard = steadystep.Guard(model, made[0])
    outcomes = []
    for step, x in enumerate(batches(240)):
        raise_rate(model, step)
        outcomes.append(guard.step(lambda x: (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean(), batch=x))
    for back in (outcome for outcome in outcomes if outcome.restored is not None):
        assert back.plan.actions != ("rollback", "replay")
        assert back.plan.lr is not None
    assert all(p.isfinite().all() for p in model.parameters())


def test_weights_that_updates_threw_off_are_not_thrown_off_again() -> None:
    """The batches themselves carry gradients that are too large: they stay out, and the others are replayed."""

    def run(mode: str) -> tuple[list[Tensor], list[Outcome]]:
        task = TASKS["clusters"].make(1)
        config = {"mode": mode, "monitoring": {"explosion_threshold": 100.0}}  # or they were held down at once
        guard = steadystep.Guard(task.model, task.optimizer, config=config)
        outcomes = []
        for step in range(232):
            batch = (*task.batch(), 9.0 if 200 <= step < 220 else 1.0)

            def loss(batch: Any) -> Tensor:
                value = task.loss(batch[:2])
                return value + (batch[2] - 1.0) * (value - value.detach())  # the same loss with a longer gradient

            outcomes.append(guard.step(loss, batch=batch))
        return [p.detach().clone() for p in task.model.parameters()], outcomes

    (plain, _), (guarded, outcomes) = run("observe"), run("autopilot")
    back = next(outcome for outcome in outcomes if outcome.restored is not None)
    assert {"weight-jump", "slow-divergence"} & {finding.detector for finding in back.findings}
    assert {each.step for each in back.quarantined} == {*range(200, min(220, back.step + 1))}
    assert back.replayed == back.step - back.plan.to - len(back.quarantined)
    assert back.plan.actions == ("rollback", "replay", "skip-batches")
    assert not all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))


def test_a_scheduler_that_is_kept_stays_where_the_updates_are() -> None:
    torch.manual_seed(0)
    model = Net()
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 / (1.0 + 0.01 * step))
    guard = steadystep.Guard(model, made)
    guard.keep("scheduler", scheduler)
    for step, x in enumerate(batches(STEPS)):
        if step == 90:
            with torch.no_grad():
                nan_weight(model)
        outcome = guard.step(lambda x: (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean(), batch=x)
        scheduler.step()
        if step == 90:
            assert outcome.replayed
    assert guard.updates == STEPS
    assert scheduler.last_epoch == STEPS
    assert made.param_groups[0]["lr"] == pytest.approx(0.01 / (1.0 + 0.01 * STEPS))


def done(updates: int, elements: int = 1) -> RecordedUpdate:
    work = RecordedMicroBatch(BatchClosure(lambda x: x, torch.zeros(elements), None), None)
    signals = Signals(step=updates, loss=1.0, grad_norm=1.0)
    return RecordedUpdate((work,), signals, ({"lr": 0.1},), updates=updates)


@given(st.lists(st.sampled_from(["add", "forget", "keep", "gap"]), max_size=60), st.integers(0, 40))
def test_a_backlog_gives_all_updates_since_or_none(acts: list[str], since: int) -> None:
    replay_buffer, now, known = ReplayBuffer(max_bytes=1e9), 0, set[int]()
    for act in acts:
        if act in ("add", "gap"):
            now += 1
            if act == "add":
                replay_buffer.add(done(now))
                known.add(now)
        elif act == "forget":
            replay_buffer.forget_until(now // 2)
            known = {n for n in known if n > now // 2}
        else:
            now = max(now - 3, 0)
            replay_buffer.keep_until(now)
            known = {n for n in known if n <= now}
    later = sorted(n for n in known if n > since)
    expected = later if later == list(range(since + 1, now + 1)) else []
    assert [d.updates for d in replay_buffer.since(since, until=now)] == expected


@dataclass
class Sample:
    x: Tensor
    name: str


def test_the_size_of_a_batch() -> None:
    row = torch.zeros(3, 4)
    assert size_of({"x": row, "y": [row, (row.half(), "name")], "z": 3}) == 48 + 48 + 24
    assert size_of([row.clone().share_memory_(), row]) == 2**20 + 48
    assert size_of([Sample(row, "a"), np.zeros(5), b"abc"]) == 48 + 40 + 3
    assert size_of(row.to_sparse()) == math.inf
    assert size_of(["text"] * 10_000) == math.inf  # too much to look through at every step
    assert size_of(object()) == math.inf
    endless: list[Any] = [row]
    endless.append(endless)
    assert size_of(endless) == math.inf


def test_what_the_closure_holds_counts_too() -> None:
    row = torch.zeros(3, 4)

    def made(closure: Any) -> float:
        return bytes_of(row, closure)

    rollout, model = torch.zeros(10), nn.Linear(2, 2)
    assert made(lambda x: model(x)) == 48
    assert made(lambda x: x + rollout) == 48 + 40
    assert made(functools.partial(torch.add, other=rollout)) == 48 + 40


def test_no_more_than_512_updates_are_held() -> None:
    replay_buffer = ReplayBuffer(max_bytes=1e9)
    for number in range(1, 1001):
        replay_buffer.add(done(number))
    assert len(replay_buffer.since(488, until=1000)) == 512
    assert replay_buffer.since(487, until=1000) == ()


def test_too_large_once_is_too_large_after_a_resume() -> None:
    replay_buffer, other = ReplayBuffer(max_bytes=10.0), ReplayBuffer(max_bytes=10.0)
    assert replay_buffer.open
    replay_buffer.add(done(1, elements=100))
    other.load_state_dict(json.loads(json.dumps(replay_buffer.state_dict())))
    assert (replay_buffer.open, other.open) == (False, False)
    assert replay_buffer.since(0, until=1) == ()


def loop(
    steps: int = STEPS, *, change: Callable[[nn.Module, torch.optim.Optimizer, int], None], **settings: Any
) -> Any:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = steadystep.Guard(model, optimizer)
    outcomes = []
    for step, x in enumerate(batches(steps)):
        with torch.no_grad():
            change(model, optimizer, step)
        outcomes.append(guard.step(lambda x: (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean(), batch=x))
    return guard, optimizer, [outcome for outcome in outcomes if outcome.restored is not None]


def test_options_that_were_changed_stay_changed() -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 75:
            optimizer.param_groups[0]["weight_decay"] = 0.3
            optimizer.param_groups[0]["betas"] = (0.8, 0.99)
        if step == 90:
            nan_weight(model)

    _, optimizer, (back,) = loop(change=change)
    assert back.plan.actions == ("rollback", "replay")
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["betas"]) == (0.3, (0.8, 0.99))


def test_a_group_that_was_added_since_ends_it_before_it_begins() -> None:
    extra = nn.Parameter(torch.zeros(1))

    def change(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 80:
            optimizer.add_param_group({"params": [extra]})
        if step == 90:
            nan_weight(model)

    guard, _, (back,) = loop(change=change)
    assert back.replayed == 0
    assert guard.updates == back.restored + STEPS - 91


def test_a_held_rate_is_held_for_the_batch_at_hand_too() -> None:
    used = []

    def change(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
        if step == 70:
            optimizer.param_groups[0]["lr"] = 1.0
        if step == 90:
            nan_weight(model)

    _, _, (back,) = loop(change=change)
    assert back.replayed > 0
    assert set(used) == {0.01}


def test_what_is_interrupted_leaves_true_counts() -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = steadystep.Guard(model, optimizer)
    calls = [0]

    def loss(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 105:
            raise KeyboardInterrupt
        return (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean()

    def train_on() -> None:
        for step, x in enumerate(batches(STEPS)):
            if step == 90:
                with torch.no_grad():
                    nan_weight(model)
            guard.step(loss, batch=x)

    with pytest.raises(KeyboardInterrupt):
        train_on()
    assert calls[0] > 91  # it happened while updates were made again
    assert guard.updates == int(optimizer.state[model.body[0].weight]["step"]) < 90
    assert all(p.isfinite().all() for p in model.parameters())
    for x in batches(5):
        assert guard.step(loss, batch=x).stepped


def test_after_a_gap_nothing_is_made_again() -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for step, x in enumerate(batches(92)):
        if step == 90:
            with torch.no_grad():
                nan_weight(model)

        def loss(x: Tensor) -> Tensor:
            return (model(x).squeeze(-1) - x[:, 1:].sum(-1)).square().mean()

        outcome = guard.step(lambda x=x, f=loss: f(x)) if 80 <= step < 90 else guard.step(loss, batch=x)
        if step == 90:
            assert outcome.replayed == 0
            assert "rollback" in outcome.plan.actions
            assert outcome.plan.lr is None  # no learning rate did that


def test_a_sparse_batch_is_no_trouble() -> None:
    model = nn.Linear(4, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(30):
        x = torch.randn(8, 4).relu().to_sparse()
        assert guard.step(lambda x: torch.sparse.mm(x, model.weight.t()).square().mean(), batch=x).stepped
    assert guard.updates == 30
