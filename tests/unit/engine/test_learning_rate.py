"""Who owns the learning rate, and where the schedule stands."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steadystep
from steadystep.engine.learning_rate import LearningRate, check_rates
from steadystep.errors import MisuseError
from tests.loops import batches, squared


def test_without_a_schedule_the_users_value_is_read_and_left_alone() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer)
    x = batches(1)[0]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    for _ in range(4):
        seen.append(guard.step(lambda: squared(model, x)).signals.lr)
        scheduler.step()
    assert seen == [0.1, 0.05, 0.025, 0.0125]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.00625)


@given(st.lists(st.booleans(), max_size=20))
def test_the_schedule_stands_at_the_number_of_updates(good: list[bool]) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    guard = steadystep.Guard(
        model,
        optimizer,
        schedule=lambda n: 1.0 / (n + 1),
        config={"training": {"auto_recovery": False}, "recovery": {"max_skips_in_a_row": 99}},
    )
    x = batches(1)[0]
    updates = 0
    for fine in good:
        outcome = guard.step(lambda fine=fine: squared(model, x) * (1.0 if fine else math.nan))
        assert outcome.signals.lr == 0.5 / (updates + 1)
        updates += fine
    assert guard.updates == updates


def test_groups_keep_their_own_base_also_those_added_later() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}], lr=1.0
    )
    guard = steadystep.Guard(model, optimizer, schedule=lambda n: 0.5)
    x = batches(1)[0]
    guard.step(lambda: squared(model, x))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 8.0})
    model.zero_grad()
    guard.step(lambda: squared(model, x))
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5, 4.0]


def test_a_learning_rate_in_a_tensor_is_filled_not_replaced() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    held = optimizer.param_groups[0]["lr"]
    steadystep.Guard(model, optimizer, config={"training": {"learning_rate": 0.25}})
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.25


def trained(config: dict, steps: int, **kwargs) -> tuple[list[float], steadystep.Guard]:
    model = nn.Linear(6, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.5), config={"training": config}, **kwargs)
    x = batches(1)[0]
    return [guard.step(lambda: squared(model, x)).signals.lr for _ in range(steps)], guard


def test_a_schedule_from_yaml() -> None:
    seen, _ = trained({"lr_scheduler": "linear", "warmup_steps": 2, "total_steps": 6, "learning_rate": "1e-1"}, 7)
    assert seen == pytest.approx([0.0, 0.05, 0.1, 0.075, 0.05, 0.025, 0.0])


def test_warmup_alone_is_followed_by_a_constant_rate() -> None:
    seen, _ = trained({"warmup_steps": 0.2, "total_steps": 10}, 5)
    assert seen == pytest.approx([0.0, 0.25, 0.5, 0.5, 0.5])


def test_min_lr_is_a_learning_rate() -> None:
    seen, _ = trained({"lr_scheduler": "cosine", "total_steps": 4, "min_lr": 0.1}, 6)
    assert seen[0] == 0.5
    assert seen[4:] == pytest.approx([0.1, 0.1])


def test_options_reach_the_schedule() -> None:
    seen, _ = trained({"lr_scheduler": "step", "scheduler_options": {"step_size": 2, "gamma": 0.5}}, 5)
    assert seen == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125])


def test_a_plateau_from_yaml_moves_with_validation_and_resumes() -> None:
    config = {"lr_scheduler": "plateau", "scheduler_options": {"patience": 0, "factor": 0.5}}
    seen, guard = trained(config, 1)
    for loss in (1.0, 1.0, 1.0):
        guard.validate(val_loss=loss)
    _, again = trained(config, 0)
    again.load_state_dict(guard.state_dict())
    x = batches(1)[0]
    model = nn.Linear(6, 1)
    again.step(lambda: squared(model, x) * 0.0 + next(iter(again._optimizer.param_groups[0]["params"])).sum())
    assert seen == [0.5]
    assert again._optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lr_scheduler": "cosin"}, "did you mean 'cosine'"),
        ({"lr_scheduler": "cosine", "warmup_steps": 100, "total_steps": 50}, "warmup_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 1.5}, "warmup_steps"),
        ({"min_lr": 0.1}, "have no effect without lr_scheduler"),
        ({"lr_scheduler": "cosine", "learning_rate": 0.01, "min_lr": 0.1}, "above the learning rate"),
        ({"lr_scheduler": "linear", "scheduler_options": {"powr": 2}}, "powr"),
        ({"fp32_modules": ["nothing*"]}, "matches no module"),
    ],
)
def test_schedules_that_cannot_be_say_so(config: dict, says: str) -> None:
    with pytest.raises(steadystep.ConfigError, match=says):
        trained(config, 0)


def test_two_owners_of_the_learning_rate_are_refused() -> None:
    with pytest.raises(steadystep.ConfigError, match="use one of them"):
        trained({"lr_scheduler": "cosine"}, 0, schedule=lambda n: 1.0)


def test_fp32_modules_from_yaml() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    config = {"training": {"mixed_precision": "bf16", "fp32_modules": ["1"]}}
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    seen = []
    guard.step(lambda: (seen.append(model(batches(1)[0])), seen[-1].mean())[1])
    assert seen[0].dtype == torch.float32
    guard.close()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batches(1)[0]).dtype == torch.bfloat16


@pytest.mark.parametrize(("rule", "times"), [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0)])
def test_lr_scaling_follows_the_effective_batch_and_resumes_once(rule: str, times: float) -> None:
    def make() -> tuple[torch.optim.Optimizer, steadystep.Guard]:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.01)
        training = {"gradient_accumulation_steps": 9, "lr_scaling": rule}
        return optimizer, steadystep.Guard(model, optimizer, config={"training": training})

    optimizer, guard = make()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.01 * times, 0.02 * times])
    other, again = make()
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict(guard.state_dict())
    assert [g["lr"] for g in other.param_groups] == pytest.approx([0.01 * times, 0.02 * times])


def test_the_guards_own_schedule_is_announced() -> None:
    x = batches(1)[0]
    for config, schedule in (
        ({"warmup_steps": 5}, None),
        ({"lr_scheduler": "cosine", "warmup_steps": 5, "total_steps": 20}, None),
        ({}, lambda n: min(1.0, (n + 1) / 5)),
    ):
        model = nn.Linear(6, 1)
        guard = steadystep.Guard(
            model, torch.optim.SGD(model.parameters(), lr=0.5), config={"training": config}, schedule=schedule
        )
        seen = [guard.step(lambda m=model: squared(m, x)).signals for _ in range(8)]
        assert {signals.announced_lr for signals in seen} == {0.5}
    model = nn.Linear(6, 1)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.5), schedule=lambda n: 1.0 + n)
    seen = [guard.step(lambda: squared(model, x)).signals for _ in range(3)]
    assert [(signals.lr, signals.announced_lr) for signals in seen] == [(0.5, 0.5), (1.0, 1.0), (1.5, 1.5)]


def test_without_a_schedule_nothing_is_announced_by_the_guard() -> None:
    _, guard = trained({}, 1)
    assert guard._parts.learning_rate.announced == 0.0


def test_a_leap_late_in_a_decay_is_held_at_the_last_rate_and_a_restart_is_not() -> None:
    def rates_in_use(leap: float) -> tuple[float, list[float]]:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        guard = steadystep.Guard(model, optimizer)
        decay = [1e-2 * 0.97**i for i in range(160)]
        outcomes = []
        for lr, x in zip([*decay, leap, leap, decay[-1]], batches(163), strict=True):
            optimizer.param_groups[0]["lr"] = lr
            outcomes.append(guard.step(lambda x=x: squared(model, x)))
            assert optimizer.param_groups[0]["lr"] == lr
        assert all(outcome.stepped for outcome in outcomes)
        return decay[-1], [outcome.lr for outcome in outcomes[-3:]]

    last, used = rates_in_use(50 * 1e-2 * 0.97**159)
    assert used == pytest.approx([last] * 3)
    last, used = rates_in_use(1e-2)
    assert used == pytest.approx([1e-2, 1e-2, last])


@pytest.mark.parametrize("by_hand", [False, True])
def test_after_a_warm_up_a_run_is_watched_as_any_other(by_hand: bool) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = steadystep.Guard(model, optimizer, config={"training": {} if by_hand else {"warmup_steps": 100}})
    (watching,) = (d for d in guard._parts.judge.detectors if d.name == "slow-divergence")
    x = batches(1)[0]
    for step in range(150):
        if by_hand:
            optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 100)
        guard.step(lambda: squared(model, x))
        assert not watching._rise.climbing


def optimizer_of(*rates: float | torch.Tensor, default: float = 0.1) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=default)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class TestRatesThatAreNone:
    def test_numbers_and_tensors_are_fine(self) -> None:
        for rate in (0.1, 1, True, math.nan, torch.tensor(0.1)):
            optimizer = optimizer_of(0.1, 0.2)
            optimizer.param_groups[1]["lr"] = rate
            check_rates(optimizer)
        del optimizer.param_groups[1]["lr"]  # some optimizers find their own
        check_rates(optimizer)

    def test_anything_else_is_refused_by_the_number_of_its_group(self) -> None:
        for rate in ("0.1", None, [0.1]):
            optimizer = optimizer_of(0.1, 0.2)
            optimizer.param_groups[1]["lr"] = rate
            with pytest.raises(MisuseError, match=r"group 1"):
                check_rates(optimizer)

    def test_there_must_be_parameters_in_some_group(self) -> None:
        optimizer = optimizer_of(0.1, 0.2)
        for group, fine in ((0, True), (1, False)):
            optimizer.param_groups[group]["params"] = []
            if fine:
                check_rates(optimizer)
        with pytest.raises(MisuseError):
            check_rates(optimizer)


class TestStart:
    @pytest.mark.parametrize(
        ("rates", "default", "expected"),
        [
            ((0.1, 0.2), 0.1, [1.0, 2.0]),  # in proportion to the default
            ((0.1, 0.2), 0.5, [0.5, 1.0]),  # or to the largest
            ((0.0, 0.0), 0.0, [1.0, 1.0]),
            ((0.0, 0.1), 0.0, [1.0, 1.0]),
            ((0.0, 0.1), 0.1, [0.0, 1.0]),
        ],
    )
    def test_groups_keep_their_ratios(self, rates: tuple[float, ...], default: float, expected: list[float]) -> None:
        optimizer = optimizer_of(*rates, default=default)
        LearningRate(optimizer, start=1.0, schedule=None)
        assert rates_of(optimizer) == pytest.approx(expected)

    def test_times_comes_after_the_start_and_before_the_schedule(self) -> None:
        optimizer, asked = optimizer_of(0.1, 0.2), []

        def planned(*, base_lr: float) -> None:
            asked.append(base_lr)

        rate = LearningRate(optimizer, start=1.0, schedule=None, planned=planned, times=3.0)
        assert rates_of(optimizer) == pytest.approx([3.0, 6.0])
        assert asked == pytest.approx([6.0])
        assert not rate.scheduled
        assert rate.plateau is None
        own = LearningRate(optimizer, start=None, schedule=lambda n: 0.5, planned=planned)
        assert own.scheduled
        assert len(asked) == 1  # the user's own comes first
        assert own.announced == pytest.approx(6.0)
        own.place(3)
        assert rates_of(optimizer) == pytest.approx([1.5, 3.0])

    def test_a_schedule_must_be_a_function(self) -> None:
        with pytest.raises(MisuseError):
            LearningRate(optimizer_of(0.1), start=None, schedule=0.5)  # type: ignore[arg-type]

    def test_what_is_saved_is_put_back_where_the_guard_sets_the_start(self) -> None:
        for start, times, put in ((None, 1.0, False), (0.5, 1.0, True), (None, 2.0, True)):
            one, other = optimizer_of(0.1, 0.2), optimizer_of(0.1, 0.2)
            first, second = (LearningRate(o, start=start, schedule=None, times=times) for o in (one, other))
            one.param_groups[0]["lr"] = 7.0
            second.load_state_dict(first.state_dict())
            assert (rates_of(other)[0] == 7.0) is put

    def test_a_start_that_is_another_now_is_used_in_proportion(self) -> None:
        one, other = optimizer_of(0.1), optimizer_of(0.1)
        first = LearningRate(one, start=0.5, schedule=lambda n: 1.0)
        second = LearningRate(other, start=0.25, schedule=lambda n: 1.0)
        one.param_groups[0]["lr"] = 0.1
        with pytest.warns(UserWarning, match=r"0\.25"):
            second.load_state_dict(first.state_dict())
        assert rates_of(other) == pytest.approx([0.05])
        second.place(0)
        assert rates_of(other) == pytest.approx([0.25])

    def test_another_number_of_groups_is_refused(self) -> None:
        two = LearningRate(optimizer_of(0.1, 0.2), start=0.5, schedule=lambda n: 1.0)
        one = LearningRate(optimizer_of(0.1), start=0.5, schedule=lambda n: 1.0)
        for rate, state in ((one, two.state_dict()), (two, one.state_dict())):
            with pytest.raises(MisuseError):
                rate.load_state_dict(state)
        later = LearningRate(optimizer_of(0.1, 0.2), start=None, schedule=lambda n: 1.0)
        later.load_state_dict(LearningRate(optimizer_of(0.1), start=None, schedule=lambda n: 1.0).state_dict())
        with pytest.raises(MisuseError):
            LearningRate(optimizer_of(0.1), start=None, schedule=lambda n: 1.0).load_state_dict(
                later.state_dict() | {"bases": [0.1, 0.2]}
            )


class TestOneUpdateUnderTheCeiling:
    def test_every_group_is_lowered_and_put_back(self) -> None:
        held = torch.tensor(0.4)
        optimizer = optimizer_of(0.2, held)
        rate = LearningRate(optimizer, start=None, schedule=None)
        assert rate.lower(0.4) == 1.0
        assert rate.ceiling.asked == 0.4
        rate.ceiling.limit(0.1)
        assert rate.lower(0.4) == pytest.approx(0.25)
        assert rates_of(optimizer) == pytest.approx([0.05, 0.1])
        rate.put_back()
        assert rates_of(optimizer) == pytest.approx([0.2, 0.4])
        assert optimizer.param_groups[1]["lr"] is held
        optimizer.param_groups[0]["lr"] = 0.01
        rate.put_back()  # once only
        assert rates_of(optimizer)[0] == 0.01

    def test_what_is_below_it_is_left_alone(self) -> None:
        optimizer = optimizer_of(0.1)
        rate = LearningRate(optimizer, start=None, schedule=None)
        rate.ceiling.limit(0.2)
        assert rate.lower(0.1) == 1.0
        optimizer.param_groups[0]["lr"] = 0.15
        rate.put_back()
        assert rates_of(optimizer) == [0.15]

    def test_groups_that_share_a_tensor_are_lowered_once(self) -> None:
        shared = torch.tensor(0.4)
        optimizer = optimizer_of(shared, shared)
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"] = shared
        rate = LearningRate(optimizer, start=None, schedule=None)
        rate.ceiling.limit(0.1)
        rate.lower(0.4)
        assert rates_of(optimizer) == pytest.approx([0.1, 0.1])
        rate.put_back()
        assert rates_of(optimizer) == pytest.approx([0.4, 0.4])

    def test_an_optimizer_without_a_rate_gets_none(self) -> None:
        optimizer = optimizer_of(0.4, 0.2)
        del optimizer.param_groups[1]["lr"]
        rate = LearningRate(optimizer, start=None, schedule=None)
        rate.ceiling.limit(0.1)
        rate.lower(0.4)
        rate.put_back()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
        assert "lr" not in optimizer.param_groups[1]
        assert rate.state_dict()["rates"] == pytest.approx([0.4, 0.0])
