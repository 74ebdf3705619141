"""States kept in memory: which, how often, how many, and that going back is exact."""

import math
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import steadystep
from steadystep.snapshots import Snapshots
from steadystep.snapshots.placement import interval_mult, to_replace
from steadystep.snapshots.tensor_state import TensorState
from tests.loops import OPTIMIZERS, assert_same, batches, full_state, small_net, squared

CPU = torch.device("cpu")


@given(st.integers(3, 6), st.integers(0, 5), st.integers(8, 40))
def test_a_pinned_state_is_never_replaced(count: int, pinned: int, times: int) -> None:
    model = nn.Linear(1, 1)
    trained = SimpleNamespace(parameters=list(model.parameters()))
    state = TensorState(model, torch.optim.SGD(model.parameters(), lr=0.1), trained)
    kept = Snapshots(state, count=count, device=CPU, min_interval=20)
    for step in range(0, 20 * times, 20):
        if step == 20 * pinned + 20:
            kept.pinned = 20 * pinned
        kept.take(step=step, updates=step, lr=0.1, parts={})
    assert 20 * pinned in [each.step for each in kept.states]
    assert len(kept.states) == min(count, times)


class TestRing:
    def walk(self, interval: int, count: int, times: int, *, suspected: int | None = None) -> list[list[int]]:
        """The steps that are remembered after each of `times` snapshots."""
        steps: list[int] = []
        seen = []
        for now in range(0, interval * times, interval):
            if len(steps) >= count:
                since = suspected if suspected is not None and suspected < now else None
                steps.pop(to_replace(steps, now=now, interval=interval, suspected_since=since))
            steps.append(now)
            seen.append(list(steps))
        return seen

    @given(st.integers(1, 200), st.integers(2, 6), st.integers(1, 80))
    def test_young_and_old_are_always_at_hand(self, interval: int, count: int, times: int) -> None:
        for steps in self.walk(interval, count, times):
            ages = [(steps[-1] - step) // interval for step in steps]
            assert steps == sorted(steps)
            assert len(steps) <= count
            assert ages[-1] == 0
            if steps[-1] >= 5 * interval and count > 2:
                assert 4 <= ages[0] <= 13  # an old one, but not for ever
            if len(steps) > 3:
                assert ages[-2] == 1  # and one that has just become trusted

    @given(st.integers(1, 50), st.integers(2, 5), st.integers(1, 2000), st.integers(1, 30))
    def test_the_last_from_before_a_suspicion_is_kept(self, interval: int, count: int, since: int, more: int) -> None:
        began = since // interval
        seen = self.walk(interval, count, began + more, suspected=since)
        before = [step for step in seen[min(began, len(seen) - 1)] if step < since]
        for steps in seen[began:]:
            given_up = count == 2 and steps[-1] - before[-1] > 8 * interval  # of two, one must become trusted
            assert before[-1] in steps or given_up

    @given(
        st.integers(1, 8),
        st.integers(1, 40),
        st.floats(0, 1e11),
        st.none() | st.integers(0, 2000),
        st.integers(1, 600),
        st.lists(st.integers(0, 3), max_size=12),
    )
    def test_a_trusted_state_is_never_far_away(
        self, count: int, trust: int, size: float, since: int | None, lasting: int, late: list[int]
    ) -> None:
        """Whatever is suspected, and where states are missing: those of troubled times are not taken."""
        interval = interval_mult(size, count) * trust
        steps = [-1]
        now = -1
        for i in range(60):
            missed = late[i] if i < len(late) else 0
            now += interval * (1 + missed)
            suspected = since if since is not None and since < now <= since + lasting else None
            if len(steps) >= count:
                steps.pop(to_replace(steps, now=now, interval=interval, suspected_since=suspected))
            steps.append(now)
            assert steps == sorted(set(steps))
            if count == 1 or i < len(late) + 10:  # one alone is not trusted at first, and that is all there is
                continue
            for step in (now, now + interval - 1):  # just after, and just before the next one
                assert any(trust <= step - kept <= 9 * interval + trust for kept in steps)
                if suspected is None:
                    assert any(2 * trust <= step - kept <= 9 * interval + trust for kept in steps)

    @given(st.integers(1, 8), st.integers(1, 50), st.none() | st.integers(0, 400))
    def test_untrained_weights_go_first(self, count: int, interval: int, since: int | None) -> None:
        steps = [-1]
        for now in range(interval - 1, 40 * interval, interval):
            suspected = since if since is not None and since < now else None
            if len(steps) >= count:
                steps.pop(to_replace(steps, now=now, interval=interval, suspected_since=suspected))
                last_before = max((step for step in steps if suspected is not None and step < suspected), default=None)
                assert steps[:1] != [-1] or last_before == -1
            steps.append(now)
        assert -1 not in steps or count > 2

    def test_a_suspicion_that_never_ends_does_not_hold_one_of_two_for_ever(self) -> None:
        assert to_replace([39, 119], now=159, interval=40, suspected_since=50) == 1
        assert to_replace([39, 119], now=160, interval=40, suspected_since=50) == 0
        assert to_replace([39, 359, 379], now=9999, interval=40, suspected_since=50) != 0

    def test_one_place_is_overwritten_each_time(self) -> None:
        assert to_replace([7], now=100, interval=20) == 0
        assert to_replace([7], now=1000, interval=20, suspected_since=50) == 0

    @given(
        st.lists(st.integers(-1, 500), min_size=1, max_size=5, unique=True).map(sorted),
        st.integers(1, 100),
        st.none() | st.integers(0, 500),
    )
    def test_it_is_always_a_place(self, steps: list[int], interval: int, since: int | None) -> None:
        place = to_replace(steps, now=steps[-1] + interval, interval=interval, suspected_since=since)
        assert 0 <= place < len(steps)


def tensor_state(model: nn.Module, optimizer: Optimizer) -> TensorState:
    return TensorState(model, optimizer, SimpleNamespace(parameters=[p for p in model.parameters() if p.requires_grad]))


def snapshots(model: nn.Module, optimizer: Optimizer, **options: Any) -> Snapshots:
    return Snapshots(tensor_state(model, optimizer), **{"count": 3, "device": CPU} | options)


def train(model: nn.Module, optimizer: Optimizer, data: list[Tensor]) -> None:
    for x in data:
        optimizer.zero_grad()
        squared(model, x).backward()
        optimizer.step()


def take(kept: Snapshots, step: int, **more: Any) -> None:
    kept.take(step=step, updates=step, lr=0.1, parts={}, **more)


class TestGoingBack:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("before", [0, 4])
    def test_weights_buffers_and_moments_are_what_they_were(self, name: str, before: int) -> None:
        """With `before` 0 the optimizer has no state yet: what it makes later must go again."""
        model = small_net()
        optimizer = OPTIMIZERS[name](model.parameters())
        kept = snapshots(model, optimizer)
        train(model, optimizer, batches(before))
        expected = full_state(model, optimizer)
        references = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
        take(kept, 7)
        train(model, optimizer, batches(5, seed=2))
        assert any(not torch.equal(a, b) for a, b in zip(expected.values(), model.state_dict().values(), strict=False))
        assert kept.roll_back(7, replay=False).updates == 7
        assert_same(expected, full_state(model, optimizer))
        # In place: others hold them too.
        assert [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())] == references
        # And twice: going back does not wear the snapshot out.
        train(model, optimizer, batches(5, seed=3))
        kept.roll_back(7, replay=False)
        assert_same(expected, full_state(model, optimizer))

    def test_training_goes_on_as_it_did(self) -> None:
        data = batches(8)
        for make in OPTIMIZERS.values():
            model = small_net(dropout=0.0)
            optimizer = make(model.parameters())
            kept = snapshots(model, optimizer)
            train(model, optimizer, data[:3])
            take(kept, 0)
            train(model, optimizer, data[3:])
            expected = full_state(model, optimizer)
            kept.roll_back(0, replay=False)
            train(model, optimizer, data[3:])
            assert_same(expected, full_state(model, optimizer))

    def test_groups_go_back_but_the_learning_rate_is_its_owners(self) -> None:
        model = small_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
        group = optimizer.param_groups[0]
        group["betas"], group["mark"], group["initial_lr"] = (0.8, 0.9), torch.tensor(1.0), 0.1
        kept = snapshots(model, optimizer)
        take(kept, 0)
        group["mark"].fill_(5.0)
        group.update(lr=0.3, weight_decay=0.5, betas=(0.1, 0.2), initial_lr=0.4)
        kept.roll_back(0, replay=False)
        assert (group["weight_decay"], group["betas"], float(group["mark"])) == (0.2, (0.8, 0.9), 1.0)
        assert (group["lr"], group["initial_lr"]) == (0.3, 0.4)
        assert group["params"] == list(model.parameters())

    def test_buffers_that_changed_their_shape_or_came_and_went(self) -> None:
        model = small_net()
        model.register_buffer("cache", torch.ones(2))
        model.register_buffer("none", None)
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1))
        take(kept, 0)
        model.cache = torch.zeros(5)
        model.none = torch.zeros(1)
        kept.roll_back(0, replay=False)
        assert model.cache.tolist() == [1.0, 1.0]
        model.cache.fill_(9.0)
        model.cache = None
        kept.roll_back(0, replay=False)
        assert model.cache.tolist() == [1.0, 1.0]

    def test_moments_alone(self) -> None:
        model = small_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        kept = snapshots(model, optimizer)
        train(model, optimizer, batches(3))
        old = full_state(model, optimizer)
        take(kept, 0)
        train(model, optimizer, batches(3, seed=2))
        optimizer.param_groups[0]["weight_decay"] = 0.5
        new = full_state(model, optimizer)
        kept.moments_back(0)
        now = full_state(model, optimizer)
        assert_same({k: v for k, v in now.items() if k.startswith("model.")}, {k: new[k] for k in new if "model." in k})
        assert_same({k: v for k, v in now.items() if k.startswith("opt")}, {k: old[k] for k in old if "optim" in k})
        assert optimizer.param_groups[0]["weight_decay"] == 0.5

    def test_what_an_optimizer_added_to_its_state_goes_again(self) -> None:
        model = small_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        kept = snapshots(model, optimizer)
        train(model, optimizer, batches(2))
        expected = full_state(model, optimizer)
        take(kept, 0)
        for held in optimizer.state.values():
            held["max_exp_avg_sq"], held["note"] = torch.ones(1), 3
        kept.roll_back(0, replay=False)
        assert_same(expected, full_state(model, optimizer))

    def test_weights_for_a_while(self) -> None:
        model = small_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        kept = snapshots(model, optimizer)
        train(model, optimizer, batches(3))
        old = [p.detach().clone() for p in model.parameters()]
        take(kept, 0)
        train(model, optimizer, batches(3, seed=2))
        new = full_state(model, optimizer)

        def look() -> None:
            with kept.weights_of(kept.states[0]):
                assert all(torch.equal(a, b) for a, b in zip(old, model.parameters(), strict=True))
                raise KeyError

        with pytest.raises(KeyError):
            look()
        assert_same(new, full_state(model, optimizer))

    def test_groups_that_came_later_are_left_as_they_are(self) -> None:
        model, other = small_net(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = list(model.parameters())
        kept = Snapshots(TensorState(model, optimizer, SimpleNamespace(parameters=parameters)), count=2, device=CPU)
        take(kept, 0)
        optimizer.add_param_group({"params": other.parameters(), "lr": 0.5})
        parameters[:0] = other.parameters()
        with torch.no_grad():
            other.weight.fill_(3.0)
            model[0].weight.fill_(3.0)
        kept.roll_back(0, replay=False)
        assert bool((other.weight == 3.0).all())
        assert not bool((model[0].weight == 3.0).any())
        assert optimizer.param_groups[1]["lr"] == 0.5

    def test_the_learning_rate_goes_back_with_a_scheduler_of_torch(self) -> None:
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        kept = snapshots(model, optimizer)
        kept.keep("scheduler", scheduler)
        train(model, optimizer, batches(1))
        scheduler.step()
        take(kept, 0)
        train(model, optimizer, batches(1))
        scheduler.step()
        kept.roll_back(0, replay=False)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        train(model, optimizer, batches(1))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)

    def test_states_from_before_something_was_kept_are_dropped(self) -> None:
        model = small_net()
        with steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)) as guard:
            for x in batches(2):
                guard.step(lambda x: squared(model, x), batch=x)
                assert [state.step for state in guard._recovery.states] == [guard.attempts - 2]
                guard.keep("net", nn.Linear(1, 1))
                assert guard._recovery.states == ()

    def test_frozen_parameters_are_left_out_and_alone(self) -> None:
        model = small_net()
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        kept = snapshots(model, optimizer)
        take(kept, 0)
        assert sum(key[0] == "parameter" for key in kept.states[0].tensors) == len(list(model.parameters())) - 1
        with torch.no_grad():
            model[0].weight.fill_(3.0)
        kept.roll_back(0, replay=False)
        assert bool((model[0].weight == 3.0).all())

    @pytest.mark.parametrize("replay", [True, False])
    def test_random_numbers_go_back_only_for_a_replay(self, replay: bool) -> None:
        model = small_net()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1))
        take(kept, 0)
        first = torch.rand(3)
        second_state = torch.get_rng_state()
        kept.roll_back(0, replay=replay)
        if replay:
            assert torch.equal(torch.rand(3), first)
        else:
            assert torch.equal(torch.get_rng_state(), second_state)

    def test_younger_states_are_forgotten(self) -> None:
        model = small_net()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in (0, 20, 40):
            take(kept, step)
        kept.roll_back(20, replay=False)
        assert [state.step for state in kept.states] == [0, 20]

    def test_kept_objects_go_along_by_value(self) -> None:
        class Meter:
            def __init__(self) -> None:
                self.state = {"mean": torch.zeros(2), "seen": [1, (2, 3)], "name": "m"}

            def state_dict(self) -> dict[str, Any]:
                return self.state

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.state = state

        model, meter = small_net(), Meter()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1))
        kept.keep("meter", meter)
        take(kept, 0)
        for _ in range(2):
            meter.state["mean"].add_(1.0)
            meter.state["seen"].append(4)
            kept.roll_back(0, replay=False)
            assert meter.state["mean"].tolist() == [0.0, 0.0]
            assert meter.state["seen"] == [1, (2, 3)]

    def test_memory_is_used_again(self) -> None:
        model = small_net()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1), count=2)
        take(kept, 0)
        take(kept, 20)
        places = {tensor.data_ptr() for state in kept.states for tensor in state.tensors.values()}
        for step in range(40, 400, 20):
            take(kept, step)
        assert {tensor.data_ptr() for state in kept.states for tensor in state.tensors.values()} == places

    def test_forget(self) -> None:
        model = small_net()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1))
        take(kept, 100)
        assert not kept.due(101)
        kept.forget()
        assert kept.states == ()
        assert kept.due(5)


MIB = 2**20


class Largest:
    """Two ranks, of which the other one holds `other` bytes."""

    size = 2

    def __init__(self, other: float) -> None:
        self._other = other

    def least(self, number: float) -> float:
        return min(number, -self._other) if number < 0 else number


class TestHowOften:
    @pytest.mark.parametrize(("mib", "mult"), [(0, 1), (64, 1), (65, 2), (512, 2), (513, 4), (4096, 4), (4097, 8)])
    def test_the_interval_follows_the_size(self, mib: int, mult: int) -> None:
        assert interval_mult(mib * MIB, 4) == mult

    def test_few_states_must_live_long_enough_to_be_trusted(self) -> None:
        assert [interval_mult(0, count) for count in (1, 2, 3, 8)] == [8, 2, 1, 1]
        assert [interval_mult(2**40, count) for count in (1, 2, 3)] == [8, 8, 8]

    @pytest.mark.parametrize(("count", "expected"), [(1, 160), (2, 40), (3, 20)])
    def test_it_is_settled_by_the_first_state(self, count: int, expected: int) -> None:
        model = small_net()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1), count=count)
        take(kept, -1)
        assert kept.interval == expected

    def test_it_follows_how_many_there_is_memory_for(self) -> None:
        model = nn.Linear(100, 10, bias=False)
        kept = snapshots(model, torch.optim.AdamW(model.parameters()), memory_bytes=2.5 * 12_000)
        with pytest.warns(UserWarning, match="2 instead of 3"):
            take(kept, -1)
        assert kept.interval == 40

    def test_moments_that_are_still_to_come_are_counted(self) -> None:
        model = nn.Linear(1, 1, bias=False)
        model.weight = nn.Parameter(torch.zeros(6 * MIB))  # 24 MiB, and twice as much of moments
        kept = snapshots(model, torch.optim.AdamW(model.parameters()))
        take(kept, -1)
        assert kept.interval == 40

    def test_the_largest_rank_decides(self) -> None:
        for other, expected in ((0, 20), (100 * MIB, 40), (1000 * MIB, 80)):
            model = small_net()
            kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=Largest(other))
            take(kept, -1)
            assert kept.interval == expected

    def test_no_clock_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden() -> float:
            raise AssertionError("a decision must not depend on the time")

        for clock in ("time", "perf_counter", "thread_time", "process_time", "monotonic"):
            for name in (clock, f"{clock}_ns"):
                monkeypatch.setattr(time, name, forbidden)
        model = small_net()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(-1, 200, 20):
            assert kept.due(step)
            take(kept, step)
        kept.roll_back(kept.states[0].step, replay=True)
        monkeypatch.undo()

    def test_due_follows_the_interval(self) -> None:
        model = small_net()
        kept = snapshots(model, torch.optim.SGD(model.parameters(), lr=0.1), min_interval=30)
        assert kept.due(0)
        take(kept, 10)
        assert [kept.due(step) for step in (11, 39, 40)] == [False, False, True]


class TestHowMany:
    def affordable(self, states: float, count: int = 3) -> Snapshots:
        model = nn.Linear(100, 10, bias=False)
        size = 1000 * 4 * 3  # Adam's moments are not there yet, and will be
        optimizer = torch.optim.AdamW(model.parameters())
        return snapshots(model, optimizer, count=count, memory_bytes=states * size)

    def test_what_the_memory_bears_is_taken_and_the_rest_is_told(self) -> None:
        kept = self.affordable(2.5)
        with pytest.warns(UserWarning, match="2 instead of 3"):
            take(kept, 0)
        for step in (20, 40, 60):
            take(kept, step)
        assert len(kept.states) == 2

    def test_none_is_told_too(self) -> None:
        kept = self.affordable(0.6)
        with pytest.warns(UserWarning, match="none is kept"):
            take(kept, 0)
        assert kept.states == ()
        assert not kept.due(1000)

    def test_enough_is_not_worth_a_word(self) -> None:
        kept = self.affordable(3.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(0, 100, 20):
                take(kept, step)
        assert len(kept.states) == 3

    def test_zero_means_none(self) -> None:
        kept = self.affordable(math.inf, count=0)
        assert not kept.due(0)
        take(kept, 0)
        assert kept.states == ()
