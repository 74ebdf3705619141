"""Single operations on kept states: compare, judge, restore a part."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that it is not walked as garbage after each test
from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep.errors import MisuseError
from steadystep.parallel import SingleProcess
from steadystep.snapshots import Snapshots, storage
from steadystep.snapshots.placement import Placement, place
from steadystep.snapshots.storage import Rooms, SpillFile
from steadystep.snapshots.tensor_state import OwnValues, TensorState


class Counting(torch.optim.SGD):
    """Counts its updates beside the tensors: in a slot, in its group, in its state and in itself."""

    def count(self, number: int) -> None:
        self.state[self.param_groups[0]["params"][0]]["count"] = number
        self.param_groups[0]["count"] = number
        self.state["all"] = number


def trained(model: nn.Module, optimizer: Optimizer, value: float = 1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


def made(**more: Any) -> tuple[nn.Module, Optimizer, TensorState]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    state = TensorState(model, optimizer, SimpleNamespace(parameters=list(model.parameters())), **more)
    return model, optimizer, state


def copies(state: TensorState) -> dict[Any, Tensor]:
    return {key: tensor.clone() for key, tensor in state.tensors().items()}


class TestIsAsItWas:
    def test_the_same_is(self) -> None:
        _, _, state = made()
        assert state.is_as_in(copies(state), state.numbers())

    def test_one_parameter_may_differ_two_may_not(self) -> None:
        model, _, state = made()
        kept, numbers = copies(state), state.numbers()
        with torch.no_grad():
            model[0].weight.add_(1.0)
            assert state.is_as_in(kept, numbers)
            model[0].bias.add_(1.0)
        assert not state.is_as_in(kept, numbers)

    def test_no_moment_and_no_buffer_may(self) -> None:
        for change in (
            lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"].add_(1.0),
            lambda model, optimizer: model[1].running_mean.add_(1.0),
            lambda model, optimizer: optimizer.state[model[0].weight].pop("exp_avg"),
            lambda model, optimizer: model.register_buffer("new", torch.ones(1)),
        ):
            model, optimizer, state = made()
            kept, numbers = copies(state), state.numbers()
            change(model, optimizer)
            assert not state.is_as_in(kept, numbers)

    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("lr", 9.0, True),
            ("initial_lr", 9.0, True),
            ("weight_decay", 9.0, True),
            ("betas", (0.1, 0.2), True),
            ("amsgrad", True, False),
            ("count", 1, False),
        ],
    )
    def test_what_loops_set_does_not_count(self, key: str, value: Any, expected: bool) -> None:
        _, optimizer, state = made()
        kept, numbers = copies(state), state.numbers()
        optimizer.param_groups[0][key] = value
        assert state.is_as_in(kept, numbers) is expected

    def test_counters_count_wherever_they_are(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        trained(model, optimizer)
        first = next(iter(model.parameters()))
        state = TensorState(model, optimizer, SimpleNamespace(parameters=list(model.parameters())))
        for holder in (optimizer.state[first], optimizer.param_groups[0], optimizer.state):
            optimizer.count(3)
            kept, numbers = copies(state), state.numbers()
            assert state.is_as_in(kept, numbers)
            holder["count" if holder is not optimizer.state else "all"] = 4
            assert not state.is_as_in(kept, numbers)
            state.put_back(kept, numbers)
            assert (optimizer.state[first]["count"], optimizer.param_groups[0]["count"]) == (3, 3)
            assert optimizer.state["all"] == 3
            optimizer.state["later"] = 1
            state.put_back(kept, numbers, moments_only=True)
            assert "later" not in optimizer.state


class TestAreFinite:
    @pytest.mark.parametrize(("value", "expected"), [(1.0, True), (1e38, False), (math.inf, False), (math.nan, False)])
    def test_weights_and_moments_are_asked_buffers_are_not(self, value: float, expected: bool) -> None:
        model, optimizer, state = made()
        assert state.are_finite(state.tensors())
        model[1].running_mean.fill_(value)
        assert state.are_finite(state.tensors())
        optimizer.state[model[0].weight]["exp_avg"][0, 0] = value
        assert state.are_finite(state.tensors()) is expected
        optimizer.state[model[0].weight]["exp_avg"].zero_()
        with torch.no_grad():
            model[0].weight[0, 0] = value
        assert state.are_finite(state.tensors()) is expected

    def test_infinity_on_purpose(self) -> None:
        model, _, state = made(infinite=["0.bias"])
        with torch.no_grad():
            model[0].bias[0] = -math.inf
        assert state.are_finite(state.tensors())
        with torch.no_grad():
            model[0].weight[0, 0] = -math.inf
        assert not state.are_finite(state.tensors())


class TestPuttingBack:
    def test_learning_rates_only_where_asked(self) -> None:
        _, optimizer, state = made()
        kept, numbers = copies(state), state.numbers()
        group = optimizer.param_groups[0]
        for asked, expected in ((False, 0.5), (True, 0.1)):
            group["lr"], group["weight_decay"] = 0.5, 0.5
            state.put_back(kept, numbers, learning_rates=asked)
            assert (group["lr"], group["weight_decay"]) == (expected, 0.01)

    def test_moments_only_leave_weights_buffers_and_groups(self) -> None:
        model, optimizer, state = made()
        kept, numbers = copies(state), state.numbers()
        moments = optimizer.state[model[0].weight]["exp_avg"]
        before = moments.clone()
        trained(model, optimizer)
        model[1].running_mean.fill_(5.0)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        weights = model[0].weight.detach().clone()
        state.put_back(kept, numbers, moments_only=True)
        assert torch.equal(moments, before)
        assert torch.equal(model[0].weight, weights)
        assert model[1].running_mean.tolist() == [5.0, 5.0]
        assert optimizer.param_groups[0]["weight_decay"] == 0.5

    def test_a_moment_of_another_kind_is_replaced(self) -> None:
        model, optimizer, state = made()
        kept, numbers = copies(state), state.numbers()
        for other in (torch.ones(5), torch.ones(2, 2).double(), "none"):
            optimizer.state[model[0].weight]["exp_avg"] = other
            state.put_back(kept, numbers)
            now = optimizer.state[model[0].weight]["exp_avg"]
            expected = kept["state", id(model[0].weight), 0, "exp_avg"]
            assert torch.equal(now, expected)
            assert now.dtype is expected.dtype
            assert now.data_ptr() != expected.data_ptr()  # the kept one stays what it is


class Kept:
    """An object with some tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        self.state: dict[str, Any] = dict(tensors)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class OtherRank(SingleProcess):
    """Another rank that finds some of what is asked bad."""

    def __init__(self, bad: set[int] = frozenset(), *, same: bool = True) -> None:
        super().__init__()
        self._bad, self._same = bad, same

    def same(self, value: Any) -> bool:
        return self._same

    def mean(self, values: Any) -> list[float]:
        return [value * (0.5 if i in self._bad else 1.0) for i, value in enumerate(values)]


def ring(**more: Any) -> tuple[nn.Module, Optimizer, Snapshots]:
    model, optimizer, state = made()
    return model, optimizer, Snapshots(state, **{"count": 3, "device": torch.device("cpu")} | more)


def take(kept: Snapshots, *steps: int) -> None:
    for step in steps:
        kept.take(step=step, updates=step, lr=0.1, parts={})


class TestKeptObjects:
    def taken(self, **more: Any) -> tuple[Snapshots, Kept, Kept]:
        """Three states, with 1, 2, 3 in each object."""
        _, _, kept = ring(**more)
        ema, other = Kept(w=torch.zeros(1), v=torch.zeros(1)), Kept(w=torch.zeros(1))
        kept.keep("ema", ema)
        kept.keep("ema2", other)
        for number in (1.0, 2.0, 3.0):
            for tensor in (*ema.state.values(), *other.state.values()):
                tensor.fill_(number)
            if number == 3.0:
                ema.state["v"].fill_(math.nan)
            take(kept, int(number) * 20)
        return kept, ema, other

    def test_each_from_the_newest_state_in_which_it_is_well(self) -> None:
        for named, first, second in (
            (["kept.ema.w"], 3.0, 9.0),
            (["kept.ema.v"], 2.0, 9.0),
            (["kept.ema.w", "kept.ema.v"], 2.0, 9.0),
            (["kept.ema2.w"], 9.0, 3.0),
            (["kept.ema.v", "kept.ema2.w"], 2.0, 3.0),
            (["kept.other.w"], 9.0, 9.0),
            ([], 9.0, 9.0),
        ):
            kept, ema, other = self.taken()
            ema.state["w"].fill_(9.0)
            other.state["w"].fill_(9.0)
            kept.restore_kept(named)
            assert (ema.state["w"].item(), other.state["w"].item()) == (first, second), named

    def test_by_value(self) -> None:
        kept, ema, _ = self.taken()
        for _ in range(2):
            ema.state["w"].fill_(9.0)
            kept.restore_kept(["kept.ema.w"])
            assert ema.state["w"].item() == 3.0

    def test_left_as_it_is_where_no_state_has_it_well(self) -> None:
        kept, ema, _ = self.taken(ranks=OtherRank({0, 1, 2}))
        ema.state["w"].fill_(9.0)
        kept.restore_kept(["kept.ema.w"])
        assert ema.state["w"].item() == 9.0

    def test_another_rank_may_know_better(self) -> None:
        kept, ema, _ = self.taken(ranks=OtherRank({2}))
        kept.restore_kept(["kept.ema.w"])
        assert ema.state["w"].item() == 2.0

    def test_what_has_no_update_of_its_own_is_left_behind_by_a_replay(self) -> None:
        _, _, kept = ring()
        assert not kept.leaves_behind
        kept.keep("number", SimpleNamespace(state_dict=lambda: {"n": 1}))
        assert not kept.leaves_behind
        calls = []
        kept.keep("ema", Kept(w=torch.ones(1)), lambda: calls.append(1))
        assert not kept.leaves_behind
        kept.follow()
        assert calls == [1]
        kept.keep("ema", Kept(w=torch.ones(1)))
        assert kept.leaves_behind
        kept.follow()
        assert calls == [1]

    def test_schedulers_are_put_where_they_were(self) -> None:
        _, optimizer, kept = ring()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        kept.keep("other", Kept(w=torch.ones(1)))
        kept.keep("scheduler", scheduler)
        optimizer.step()
        scheduler.step()
        put_back = kept.schedules()
        optimizer.step()
        scheduler.step()
        put_back()
        assert scheduler.last_epoch == 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


class TestStates:
    def test_the_means_of_adams_second_moment(self) -> None:
        model, optimizer, kept = ring()
        for number, parameter in enumerate(model.parameters(), start=1):
            optimizer.state[parameter]["exp_avg_sq"].fill_(10.0**number)
        take(kept, 0)
        assert kept.states[0].second_moment == pytest.approx(11110.0)
        kept.states[0].whole = False
        assert kept.states[0].second_moment is None

    def test_without_adam_there_is_none(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trained(model, optimizer)
        state = TensorState(model, optimizer, SimpleNamespace(parameters=list(model.parameters())))
        kept = Snapshots(state, count=1, device=torch.device("cpu"))
        take(kept, 0)
        assert kept.states[0].second_moment is None

    def test_those_that_are_finite_on_every_rank(self) -> None:
        for ranks, expected in ((OtherRank(), [0, 40]), (OtherRank({0}), [40]), (OtherRank({2}), [0])):
            model, _, kept = ring(ranks=ranks)
            take(kept, 0)
            before = model[0].weight.detach().clone()
            with torch.no_grad():
                model[0].weight[0, 0] = math.nan
                take(kept, 20)
                model[0].weight.copy_(before)
            take(kept, 40)
            assert [state.step for state in kept.finite()] == expected

    def test_ranks_that_hold_other_steps_are_a_mistake(self) -> None:
        _, _, kept = ring(ranks=OtherRank(same=False))
        take(kept, 0)
        with pytest.raises(MisuseError):
            kept.finite()

    def test_what_was_passed_over_is_compared_with_until_it_is_settled(self) -> None:
        model, optimizer, kept = ring()
        take(kept, 0)
        trained(model, optimizer)
        take(kept, 20)
        kept.roll_back(0, replay=False)
        assert not kept.is_as_it_was(20)
        assert kept.is_as_it_was(10)  # without a state of so many updates
        trained(model, optimizer)
        assert kept.is_as_it_was(20)
        trained(model, optimizer)
        assert not kept.is_as_it_was(20)
        kept.settle()
        assert kept.is_as_it_was(20)

    def test_what_is_remembered_with_a_state(self) -> None:
        _, _, kept = ring()
        kept.take(step=7, updates=5, lr=0.3, parts={"a": 1}, largest_lr=0.4)
        state = kept.states[0]
        assert (state.step, state.updates, state.lr, state.largest_lr) == (7, 5, 0.3, 0.4)
        assert (state.parts, state.whole, state.file) == ({"a": 1}, True, None)
        assert kept.next_step == 27
        kept.forget()
        assert kept.next_step == 0


class TestRooms:
    def rooms(self, **more: Any) -> Rooms:
        plain = {"count": 4, "memory_bytes": math.inf, "disk_bytes": 0.0, "folder": None, "min_interval": 20}
        return Rooms(**plain | {"checkpoints": False, "ranks": SingleProcess()} | more)

    def test_a_file_gives_back_what_was_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage, "_CHUNK", 40)
        file = SpillFile(tmp_path / "new" / "folder")
        for seed in (0, 1):
            torch.manual_seed(seed)
            tensors = {
                ("parameter", 1): torch.randn(3, 5),
                ("parameter", 2): torch.randn(4, 3).t(),
                ("buffer", "", "flag"): torch.tensor([True, False, True]),
                ("buffer", "", "none"): torch.empty(0, 3),
                ("buffer", "", "one"): torch.tensor(7 + seed),
                ("state", 1, 0, "m"): torch.randn(5, dtype=torch.bfloat16),
                ("state", 1, 0, "v"): torch.randn(2, dtype=torch.float64),
            }
            found = file.write(tensors)
            assert found.keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert found[key].dtype is tensor.dtype
                assert torch.equal(found[key], tensor), key
                assert found[key].data_ptr() % 64 == 0, key  # vector instructions read it where it is
        assert file.write({}) == {}
        assert SpillFile(tmp_path).write({}) == {}

    def test_what_is_on_the_host_is_not_copied_first(self) -> None:
        dense, turned = torch.ones(2, 3), torch.arange(6.0).reshape(2, 3).t()
        found = storage._on_host({("buffer", "a"): dense, ("buffer", "b"): turned})
        assert found["buffer", "a"] is dense
        assert found["buffer", "b"].is_contiguous()
        assert torch.equal(found["buffer", "b"], turned)

    def test_before_the_first_state_nothing_is_compact(self) -> None:
        held = {("state", 1, 0, "m"): torch.zeros(2, dtype=torch.bfloat16)}
        assert self.rooms().whole(held, {}) is held

    def test_chunks_are_cut_once_they_are_large_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage, "_CHUNK", 40)
        tensors = {("buffer", i): torch.zeros(n) for i, n in enumerate((10, 1, 1, 20, 1))}
        assert [list(chunk) for chunk in storage._chunks(tensors)] == [
            [("buffer", 0), ("buffer", 1)],
            [("buffer", 2), ("buffer", 3)],
            [("buffer", 4)],
        ]

    def test_memory_first_then_files_and_each_state_its_own(self, tmp_path: Path) -> None:
        live = {("parameter", 1): torch.ones(100)}
        rooms = self.rooms(memory_bytes=1500.0, disk_bytes=1e9, folder=tmp_path)
        with pytest.warns(UserWarning, match="4"):
            rooms.decide(live)
        assert (rooms.count, rooms.interval) == (2, 40)
        first = SimpleNamespace(tensors=rooms.fill(live, None, [])[0], file=None)
        tensors, file = rooms.fill(live, None, [first])
        assert file is not None
        second = SimpleNamespace(tensors=tensors, file=file)
        live["parameter", 1].fill_(2.0)
        assert rooms.fill(live, second, [first])[1] is file
        again, none = rooms.fill(live, first, [second])
        assert none is None
        assert again["parameter", 1] is first.tensors["parameter", 1]
        assert again["parameter", 1][0].item() == 2.0
        rooms.decide({("parameter", 1): torch.ones(10**6)})  # settled once
        assert (rooms.count, rooms.interval) == (2, 40)

    @pytest.mark.parametrize(
        ("tensors", "whole", "compact"),
        [
            ({("parameter", 1): torch.ones(10)}, 120, 80),
            ({("parameter", 1): torch.ones(10), ("buffer", "", "a"): torch.ones(5)}, 120, 90),
            ({("parameter", 1): torch.ones(10), ("buffer", "", "a"): torch.ones(50)}, 240, 240),
            ({("parameter", 1): torch.ones(10), ("state", 1, 0, "m"): torch.ones(30)}, 160, 100),
            ({("parameter", 1): torch.ones(10).half()}, 60, 40),
        ],
    )
    def test_sizes(self, tensors: dict[Any, Tensor], whole: float, compact: float) -> None:
        assert storage._sizes(tensors) == (whole, compact)

    def test_compact_states_halve_moments_and_nothing_else(self) -> None:
        live = {
            ("parameter", 1): torch.full((9,), 1 / 3),
            ("state", 1, 0, "m"): torch.full((9,), 1 / 3),
            ("state", 1, 0, "step"): torch.tensor(3.0),
            ("state", 1, 0, "half"): torch.ones(9, dtype=torch.bfloat16),
            ("buffer", "", "b"): torch.ones(1, dtype=torch.bfloat16),
        }
        size, compact = storage._sizes(live)
        rooms = self.rooms(memory_bytes=(size + compact) / 2)
        with pytest.warns(UserWarning, match="4"):
            rooms.decide(live)
        assert rooms.count == 1
        kept, file = rooms.fill(live, None, [])
        assert file is None
        halved = [key for key in live if kept[key].dtype is not live[key].dtype]
        assert halved == [("state", 1, 0, "m")]
        whole = rooms.whole(kept, live)
        assert all(whole[key].dtype is live[key].dtype for key in live)
        assert torch.equal(whole["parameter", 1], live["parameter", 1])
        torch.testing.assert_close(whole["state", 1, 0, "m"], live["state", 1, 0, "m"], rtol=2**-8, atol=0.0)
        gone = {key: t for key, t in live.items() if key[-1] != "m"}
        assert rooms.whole(kept, gone)["state", 1, 0, "m"].dtype is torch.float32


@pytest.mark.parametrize(
    ("memory", "disk", "count", "expected"),
    [
        (8.0, 0.0, 4, Placement(size=10.0, in_memory=1, is_compact=True)),
        (7.9, 0.0, 4, Placement(size=10.0, in_memory=0)),
        (8.0, 10.0, 4, Placement(size=10.0, in_memory=0, on_disk=1)),
        (8.0, 0.0, 0, Placement(size=10.0, in_memory=0)),
        (10.0, 99.0, 1, Placement(size=10.0, in_memory=1)),
        (10.0, 10.0, 4, Placement(size=10.0, in_memory=1, on_disk=1)),
        (99.0, 99.0, 4, Placement(size=10.0, in_memory=4)),
    ],
)
def test_a_compact_state_is_the_last_resort(memory: float, disk: float, count: int, expected: Placement) -> None:
    placed = place(size=10.0, compact_size=8.0, count=count, memory=memory, disk=disk)
    size = 8.0 if expected.is_compact else 10.0
    assert placed == Placement(
        size=size, in_memory=expected.in_memory, on_disk=expected.on_disk, is_compact=expected.is_compact
    )
    assert placed.count == expected.in_memory + expected.on_disk


class TestOwnValues:
    def of(self, **held: Any) -> tuple[Optimizer, OwnValues]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        vars(optimizer).update(held)
        return optimizer, OwnValues(optimizer)

    def test_plain_values_come_back(self) -> None:
        generator = torch.Generator().manual_seed(3)
        optimizer, kept = self.of(count=3, seen={"a": [1, 2]}, level=torch.ones(2), noise=generator)
        first = torch.rand(2, generator=generator)
        optimizer.count, optimizer.new = 4, 5  # type: ignore[attr-defined]
        optimizer.seen["a"].append(3)  # type: ignore[attr-defined]
        optimizer.level.zero_()  # type: ignore[attr-defined]
        kept.put_back()
        held = vars(optimizer)
        assert (held["count"], held["seen"], held["new"]) == (3, {"a": [1, 2]}, 5)
        assert torch.equal(held["level"], torch.ones(2))
        assert torch.equal(torch.rand(2, generator=generator), first)

    @pytest.mark.parametrize(
        ("value", "is_kept"),
        [
            ([[[[1]]]], True),
            ([[[[[1]]]]], False),
            ([0] * 4096, True),
            ([0] * 4097, False),
            (torch.zeros(4096), True),
            (torch.zeros(4097), False),
            (torch.zeros(1, requires_grad=True), False),
            (nn.Linear(1, 1), False),
            ({"a": (1, 2.0, "b", None)}, True),
            ({"a": object()}, False),
        ],
    )
    def test_what_is_large_or_deep_or_no_value_is_left(self, value: Any, is_kept: bool) -> None:
        _, kept = self.of(thing=value)
        assert ("thing" in kept.values) is is_kept

    @pytest.mark.parametrize("name", ["state", "param_groups", "grad_scale", "_optimizer_step_pre_hooks"])
    def test_torchs_own_bookkeeping_is_left(self, name: str) -> None:
        _, kept = self.of(**{name: 3})
        assert name not in kept.values


class TestThereAndBack:
    def test_states_that_were_passed_over_are_there_again(self) -> None:
        model, optimizer, kept = ring(count=4)
        for step in (0, 20, 40, 60):
            trained(model, optimizer)
            take(kept, step)
        last = model[0].weight.detach().clone()
        kept.roll_back(20, replay=False)
        assert [state.step for state in kept.states] == [0, 20]
        trained(model, optimizer, value=5.0)
        assert kept.come_back(60).step == 60
        assert [state.step for state in kept.states] == [0, 20, 40, 60]
        assert torch.equal(model[0].weight, last)
        assert kept.is_as_it_was(40)  # nothing is passed over now

    def test_what_is_kept_holds_arrays_too(self) -> None:
        _, _, kept = ring()
        kept.keep("statistics", SimpleNamespace(state_dict=lambda: {"mean": [np.zeros(2)]}))
        assert kept.leaves_behind

    def test_the_other_rank_holds_a_part(self) -> None:
        _, _, kept = ring()
        take(kept, 0)
        assert kept.states[0].whole
        other = OtherRank()
        other.size = 2  # type: ignore[misc]
        _, _, shared = ring(ranks=other)
        take(shared, 0)
        assert not shared.states[0].whole
