"""Learning rates and other options that are set for a while, started from, saved and put back."""

from typing import Any

import pytest
import torch
from torch import nn

from steadystep.engine.learning_rate import LearningRate
from steadystep.errors import MisuseError
from steadystep.schedule import Plateau


def adam(*rates: Any, default: float = 0.1) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups, lr=default)


def rate_of(optimizer: torch.optim.Optimizer, **more: Any) -> LearningRate:
    return LearningRate(optimizer, **{"start": None, "schedule": None} | more)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class TestStart:
    @pytest.mark.parametrize(
        ("given", "default", "expected"),
        [
            ((0.1, 0.1), 0.1, [0.5, 0.5]),
            ((0.1, 0.2), 0.1, [0.5, 1.0]),  # the default is the measure
            ((0.2, 0.4), 0.1, [0.25, 0.5]),  # else the largest
            ((0.0, 0.0), 0.1, [0.5, 0.5]),
            ((0.0, 0.2), 0.1, [0.0, 0.5]),
        ],
    )
    def test_groups_keep_their_ratios(self, given: tuple[float, ...], default: float, expected: list[float]) -> None:
        optimizer = adam(*given, default=default)
        rate_of(optimizer, start=0.5)
        assert rates(optimizer) == pytest.approx(expected)

    def test_all_are_multiplied(self) -> None:
        optimizer = adam(0.1, 0.2)
        rate_of(optimizer, times=2.0)
        assert rates(optimizer) == pytest.approx([0.2, 0.4])

    def test_a_schedule_must_be_a_function(self) -> None:
        with pytest.raises(MisuseError):
            rate_of(adam(0.1), schedule=3)

    def test_a_planned_schedule_is_made_from_the_largest_rate(self) -> None:
        seen = []

        def planned(*, base_lr: float) -> Any:
            seen.append(base_lr)
            return lambda updates: 0.5

        optimizer = adam(0.1, 0.4)
        rate = rate_of(optimizer, planned=planned)
        assert (rate.scheduled, seen, rate.announced) == (True, [0.4], 0.4)
        rate_of(optimizer, planned=planned, schedule=lambda updates: 1.0)
        assert seen == [0.4]

    def test_without_a_schedule_nothing_is_announced_or_set(self) -> None:
        optimizer = adam(0.1)
        rate = rate_of(optimizer)
        rate.place(100)
        assert (rate.scheduled, rate.announced, rate.plateau, rates(optimizer)) == (False, 0.0, None, [0.1])


class TestPlace:
    def test_each_group_from_its_own_base_at_the_number_of_updates(self) -> None:
        optimizer = adam(0.1, 0.2)
        rate = rate_of(optimizer, schedule=lambda updates: 1.0 / (1 + updates))
        for updates in (0, 3, 1):
            rate.place(updates)
            assert rates(optimizer) == pytest.approx([0.1 / (1 + updates), 0.2 / (1 + updates)])
            assert rate.announced == 0.2
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.8})
        rate.place(1)
        assert rates(optimizer) == pytest.approx([0.05, 0.1, 0.4])
        assert rate.announced == 0.8

    def test_a_multiplier_above_one_is_announced(self) -> None:
        rate = rate_of(adam(0.1, 0.2), schedule=lambda updates: 3.0)
        rate.place(0)
        assert rate.announced == pytest.approx(0.6)


class TestUnderTheCeiling:
    def test_without_one_nothing_is_touched(self) -> None:
        optimizer = adam(0.1)
        rate = rate_of(optimizer)
        assert rate.lower(0.1) == 1.0
        assert rate.ceiling.asked == 0.1
        rate.put_back()
        assert rates(optimizer) == [0.1]

    @pytest.mark.parametrize("kind", [float, torch.tensor])
    def test_lowered_for_one_update_and_put_back(self, kind: Any) -> None:
        shared = kind(0.1)
        optimizer = adam(shared, shared)
        rate = rate_of(optimizer)
        rate.ceiling.limit(0.05)
        assert rate.lower(0.1) == pytest.approx(0.5)
        assert rates(optimizer) == pytest.approx([0.05, 0.05])
        rate.put_back()
        assert rates(optimizer) == pytest.approx([0.1, 0.1])
        optimizer.param_groups[0]["lr"] = kind(0.7)
        rate.put_back()  # once
        assert rates(optimizer)[0] == pytest.approx(0.7)

    def test_a_ceiling_above_what_is_asked_for(self) -> None:
        optimizer = adam(0.1)
        rate = rate_of(optimizer)
        rate.ceiling.limit(0.5)
        assert rate.lower(0.1) == 1.0
        assert rates(optimizer) == [0.1]


class TestOptions:
    def test_they_are_copies(self) -> None:
        tensor = torch.tensor(0.1)
        optimizer = adam(tensor)
        (options,) = rate_of(optimizer).options()
        tensor.fill_(9.0)
        assert float(options["lr"]) == pytest.approx(0.1)
        assert options["betas"] == (0.9, 0.999)
        optimizer.param_groups[0]["betas"] = [torch.tensor(0.5), 0.9]
        (options,) = rate_of(optimizer).options()
        optimizer.param_groups[0]["betas"][0].fill_(0.1)
        assert [float(beta) for beta in options["betas"]] == [0.5, 0.9]
        assert type(options["betas"]) is list

    def test_times_changes_the_rate_only(self) -> None:
        assert LearningRate.times(({"lr": 0.5, "eps": 1.0}, {"eps": 2.0}), 0.5) == (
            {"lr": 0.25, "eps": 1.0},
            {"eps": 2.0},
        )

    def test_put_sets_all_or_only_what_is_still_so(self) -> None:
        optimizer = adam(0.1, 0.2)
        rate = rate_of(optimizer)
        before = rate.options()
        rate.put(LearningRate.times(before, 2.0))
        assert rates(optimizer) == [0.2, 0.4]
        optimizer.param_groups[0]["lr"] = 0.7  # by the optimizer itself
        rate.put(before, in_place_of=LearningRate.times(before, 2.0))
        assert rates(optimizer) == [0.7, 0.2]

    def test_using_is_for_a_while_also_when_something_raises(self) -> None:
        optimizer = adam(0.1)
        rate = rate_of(optimizer)
        with rate.using(LearningRate.times(rate.options(), 3.0)):
            assert rates(optimizer) == pytest.approx([0.3])
        assert rates(optimizer) == [0.1]
        with pytest.raises(KeyError), rate.using(LearningRate.times(rate.options(), 3.0)):
            raise KeyError
        assert rates(optimizer) == [0.1]


class TestState:
    def test_bases_and_ceiling_go_on(self) -> None:
        first = rate_of(adam(0.1, 0.2), schedule=lambda updates: 0.5)
        first.ceiling.limit(0.03)
        optimizer = adam(0.7, 0.7)
        second = rate_of(optimizer, schedule=lambda updates: 0.5)
        second.load_state_dict(first.state_dict())
        second.place(1)
        assert rates(optimizer) == pytest.approx([0.05, 0.1])
        assert second.ceiling.lr == 0.03
        assert second.state_dict()["bases"] == [0.1, 0.2]

    def test_rates_are_put_back_only_where_the_guard_sets_them(self) -> None:
        first = rate_of(adam(0.1), start=0.5)
        for start, expected in ((0.5, 0.5), (None, 0.1)):
            optimizer = adam(0.1)
            rate_of(optimizer, start=start).load_state_dict(first.state_dict() | {"rates": [0.5]})
            assert rates(optimizer) == [expected]

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_another_start_is_used_in_proportion(self) -> None:
        state = rate_of(adam(0.1), start=0.5).state_dict() | {"rates": [0.25]}
        optimizer = adam(0.1)
        rate_of(optimizer, start=1.0).load_state_dict(state)
        assert rates(optimizer) == [0.5]
        rate_of(optimizer, start=1.0).load_state_dict({key: value for key, value in state.items() if key != "start"})
        assert rates(optimizer) == [0.25]

    def test_another_number_of_groups_is_refused(self) -> None:
        scheduled = rate_of(adam(0.1, 0.2), schedule=lambda updates: 1.0).state_dict()
        with pytest.raises(MisuseError):
            rate_of(adam(0.1), schedule=lambda updates: 1.0).load_state_dict(scheduled)
        started = rate_of(adam(0.1, 0.2), start=0.5).state_dict()
        with pytest.raises(MisuseError):
            rate_of(adam(0.1), start=0.5).load_state_dict(started)
        rate_of(adam(0.1)).load_state_dict(rate_of(adam(0.1, 0.2)).state_dict())

    def test_a_plateau_remembers(self) -> None:
        first, second = (rate_of(adam(0.1), schedule=Plateau(patience=1)) for _ in range(2))
        for metric in (1.0, 2.0, 2.0, 2.0):
            first.validated(metric)
        second.load_state_dict(first.state_dict())
        assert first.state_dict()["plateau"] is not None
        assert second.state_dict() == first.state_dict()
        assert second.plateau is not None
        rate_of(adam(0.1)).validated(1.0)
        second.load_state_dict(first.state_dict() | {"plateau": None})
        assert second.state_dict() == first.state_dict()
