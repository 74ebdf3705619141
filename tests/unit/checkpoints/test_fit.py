"""What of a state fits a model, an optimizer, the random generators and a place in the data, and what does not."""

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that it is not walked as garbage after each test
from torch import Tensor, nn

from steadystep._utils.rng import all_random_state
from steadystep._utils.tensors import type_name
from steadystep.checkpoints.atomic_io import Spread
from steadystep.checkpoints.data_position import check_place, check_random
from steadystep.checkpoints.finite import load_kept
from steadystep.checkpoints.fit import (
    _check_option,
    check_buffers,
    check_optimizer,
    check_parameters,
    check_parts,
    check_tensor,
    checked_count,
    owners,
)
from steadystep.errors import CheckpointError

CPU = torch.device("cpu")


def refused(check: Any, *arguments: Any) -> bool:
    try:
        found = check(*arguments)
        if found is not None and not isinstance(found, int):
            list(found)
    except CheckpointError:
        return True
    return False


def test_every_part_of_a_state_is_there_and_of_its_kind() -> None:
    state: dict[str, Any] = {name: {} for name in ("parameters", "buffers", "optimizer", "guard", "kept", "random")}
    state["data"] = {}
    assert not refused(check_parts, state)
    assert not refused(check_parts, state | {"random": None})
    assert not refused(check_parts, state | {"ranks": 1})
    assert refused(check_parts, state | {"ranks": 0})
    assert refused(check_parts, state | {"ranks": "2"})
    for name in state:
        assert refused(check_parts, {key: value for key, value in state.items() if key != name}), name
        assert refused(check_parts, state | {name: []}), name
        if name != "random":
            assert refused(check_parts, state | {name: None}), name


def test_a_count_is_a_whole_number_of_things() -> None:
    for value, least in ((0, 0), (1, 1), (2**53 - 1, 0)):
        assert checked_count(value, "x", least=least) == value
    for wrong, least in ((0, 1), (-1, 0), (2**53, 0), (True, 0), (1.0, 0), (None, 0), ("1", 0)):
        with pytest.raises(CheckpointError):
            checked_count(wrong, "x", least=least)
    with pytest.raises(CheckpointError):
        checked_count(-1, "x")
    assert checked_count(0, "x") == 0


def test_kinds_of_numbers() -> None:
    expected = {
        torch.bool: "bool",
        torch.int8: "whole",
        torch.int64: "whole",
        torch.uint8: "whole",
        torch.float16: "real",
        torch.bfloat16: "real",
        torch.float64: "real",
        torch.complex64: "complex",
    }
    assert {dtype: type_name(dtype) for dtype in expected} == expected


def test_a_tensor_has_its_shape_and_kind_and_any_precision() -> None:
    here = torch.ones(2, 3)
    assert not refused(check_tensor, "x", torch.ones(2, 3).double(), here)
    assert not refused(check_tensor, "x", Spread("x", torch.Size((2, 3)), torch.bfloat16), here)
    assert refused(check_tensor, "x", torch.ones(3, 2), here)
    assert refused(check_tensor, "x", torch.ones(1, 3), here)
    assert refused(check_tensor, "x", torch.ones(2, 3).long(), here)
    assert refused(check_tensor, "x", torch.ones(2, 3), nn.LazyLinear(3).weight)


def test_parameters_are_those_of_the_model() -> None:
    here = {"a": torch.ones(2), "b": torch.ones(3)}
    assert not refused(check_parameters, {"a": torch.zeros(2), "b": torch.zeros(3)}, here)
    assert refused(check_parameters, {"a": torch.zeros(2)}, here)
    assert refused(check_parameters, {**here, "c": torch.ones(1)}, here)
    assert refused(check_parameters, {**here, "b": [1.0, 2.0, 3.0]}, here)
    assert refused(check_parameters, {**here, "b": torch.ones(4)}, here)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("sparse", torch.ones(2).to_sparse())


def test_buffers_are_those_of_the_model_and_caches_are_its_own() -> None:
    model = nn.ModuleDict({"inner": Buffered()})
    assert [name for _, _, name, _ in owners(model)] == ["inner.kept", "inner.cache", "inner.none"]
    assert [name for _, _, name, _ in owners(Buffered())] == ["kept", "cache", "none"]
    fitting = {"inner.kept": torch.zeros(2), "inner.cache": torch.zeros(3)}
    assert list(check_buffers(fitting, model)) == []
    assert list(check_buffers({"inner.kept": torch.zeros(2)}, model)) == []
    assert list(check_buffers({**fitting, "inner.none": torch.zeros(9)}, model)) == []
    assert list(check_buffers({**fitting, "inner.cache": torch.zeros(7)}, model)) == ["inner.cache"]
    assert refused(check_buffers, {**fitting, "inner.cache": torch.zeros(3).long()}, model)
    assert refused(check_buffers, {**fitting, "inner.kept": torch.zeros(7)}, model)
    assert refused(check_buffers, {**fitting, "inner.kept": [0.0, 0.0]}, model)
    assert refused(check_buffers, {"inner.cache": torch.zeros(3)}, model)


def with_value(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with something else at one place."""
    if not place:
        return value
    if isinstance(tree, tuple | list):
        return type(tree)(
            with_value(v, place[1:], value) if i == place[0] % len(tree) else v for i, v in enumerate(tree)
        )
    return {**tree, place[0]: with_value(tree[place[0]], place[1:], value)}


WRONG_RANDOM: list[tuple[tuple[Any, ...], Any]] = [
    (("python", 0), 2),
    (("python", 1), (1,) * 624),
    (("python", 1), (1,) * 626),
    (("python", 1, 5), -1),
    (("python", 1, 5), 2**32),
    (("python", 1, 5), 1.0),
    (("python", 1, -1), 625),
    (("python", 2), 1),
    (("python", 2), math.inf),
    (("python",), None),
    (("numpy", "bit_generator"), "PCG64"),
    (("numpy", "has_gauss"), 2),
    (("numpy", "has_gauss"), True),
    (("numpy", "gauss"), math.nan),
    (("numpy", "gauss"), 1),
    (("numpy", "state", "key"), np.zeros(623, np.uint32)),
    (("numpy", "state", "key"), np.zeros(624, np.int64)),
    (("numpy", "state", "key"), [0] * 624),
    (("numpy", "state", "pos"), 625),
    (("numpy", "state", "pos"), -1),
    (("numpy", "state", "pos"), 1.0),
    (("torch",), torch.zeros(5, dtype=torch.uint8)),
    (("torch",), torch.zeros(5056)),
    (("torch",), None),
    (("device",), torch.zeros(2, 2, dtype=torch.uint8)),
    (("device",), torch.zeros(2)),
    (("device",), "none"),
]


def test_random_states_that_a_generator_could_have() -> None:
    random.seed(1)
    random.gauss(0.0, 1.0)  # leaves the second one of the pair behind
    saved = all_random_state(CPU)
    assert isinstance(saved["python"][2], float)
    assert not refused(check_random, saved)
    for place, value in (
        (("python", 1, 5), 0),
        (("python", 1, 5), 2**32 - 1),
        (("python", 1, -1), 624),
        (("python", 2), None),
        (("numpy", "has_gauss"), 0),
        (("numpy", "has_gauss"), 1),
        (("numpy", "state", "pos"), 0),
        (("numpy", "state", "pos"), 624),
        (("device",), None),
        (("device",), torch.zeros(16, dtype=torch.uint8)),
    ):
        assert not refused(check_random, with_value(saved, place, value)), (place, value)
    for place, value in WRONG_RANDOM:
        assert refused(check_random, with_value(saved, place, value)), (place, value)
    for part in ("python", "numpy", "torch", "device"):
        assert refused(check_random, {key: value for key, value in saved.items() if key != part}), part


def test_places_that_a_loop_could_be_at() -> None:
    generator = torch.Generator().get_state()
    began = {"started": False, "generator": generator, "random": all_random_state(CPU)}
    saved = {"epoch": 1, "batch": 2, "started": False, "generator": None, "began": began, "loader": None}
    good: list[tuple[tuple[Any, ...], Any]] = [
        (("batch_size",), 1),
        (("batch_size",), None),
        (("started",), True),
        (("loader",), {"a": 1}),
        (("began", "generator"), None),
        (("generator",), generator),
    ]
    wrong: list[tuple[tuple[Any, ...], Any]] = [
        (("epoch",), -1),
        (("epoch",), None),
        (("batch",), -1),
        (("batch",), 1.5),
        (("started",), 1),
        (("started",), None),
        (("generator",), torch.zeros(3)),
        (("generator",), torch.zeros(3, dtype=torch.uint8)),
        (("batch_size",), 0),
        (("batch_size",), "4"),
        (("began",), []),
        (("began",), {}),
        (("began", "started"), None),
        (("began", "generator"), 3),
        (("began", "random"), None),
        (("began", "random", "torch"), None),
    ]
    saved["batch_size"] = 4
    assert not refused(check_place, saved)
    for place, value in good:
        assert not refused(check_place, with_value(saved, place, value)), place
    for place, value in wrong:
        assert refused(check_place, with_value(saved, place, value)), (place, value)
    assert not refused(check_place, saved | {"began": {}, "batch": 0})
    assert not refused(check_place, saved | {"began": {}, "loader": {"a": 1}})
    for part in ("epoch", "batch", "started", "generator", "began", "loader"):
        assert refused(check_place, {key: value for key, value in saved.items() if key != part}), part


class Kept:
    """Copies into its tensor, as many do."""

    def __init__(self) -> None:
        self.value, self.name = torch.zeros(2, 2), "x"

    def state_dict(self) -> dict[str, Any]:
        return {"all": [{"value": self.value}], "name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["all"][0]["value"])
        self.name = state["name"]


def test_a_kept_object_takes_a_state_and_gives_it_back() -> None:
    thing = Kept()
    undo = load_kept("x", thing, {"all": [{"value": torch.ones(2, 2)}], "name": "y"})
    assert (thing.value.sum().item(), thing.name) == (4.0, "y")
    undo()
    assert (thing.value.sum().item(), thing.name) == (0.0, "x")


@pytest.mark.parametrize(
    "saved",
    [
        {"all": [{"value": torch.ones(2)}], "name": "y"},  # would be stretched
        {"all": [{"value": torch.ones(1)}], "name": "y"},
        {"all": [{"value": torch.ones(3)}], "name": "y"},
        {"all": [{"value": torch.ones(2, 2)}]},
    ],
)
def test_a_kept_object_that_refuses_is_as_it_was(saved: Any) -> None:
    thing = Kept()
    with pytest.raises(CheckpointError, match="x"):
        load_kept("x", thing, saved)
    assert (thing.value.sum().item(), thing.name) == (0.0, "x")


def stepped(kind: str, **options: Any) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """An optimizer after one update of three parameters, one with a single element; and its state."""
    parameters = [nn.Parameter(torch.ones(size)) for size in ((2, 3), (4,), (1,))]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, copy.deepcopy(optimizer.state_dict())


KINDS = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def test_each_optimizer_takes_its_own_state_and_none_with_a_hole() -> None:
    for kind in KINDS:
        optimizer, saved = stepped(kind)
        assert not refused(check_optimizer, saved, optimizer), kind
        assert not refused(check_optimizer, {**saved, "state": {}}, optimizer), kind
        if kind != "SGD":
            for slot in saved["state"][1]:
                hole = {name: value for name, value in saved["state"][1].items() if name != slot}
                assert refused(check_optimizer, with_value(saved, ("state", 1), hole), optimizer), (kind, slot)
        other, _ = stepped("SGD" if kind != "SGD" else "Adam")
        assert refused(check_optimizer, saved, other), kind


def test_slots_that_an_option_asks_for() -> None:
    for kind, options, slot in (
        ("Adam", {"amsgrad": True}, "max_exp_avg_sq"),
        ("RMSprop", {"centered": True}, "grad_avg"),
    ):
        optimizer, saved = stepped(kind, **options)
        assert not refused(check_optimizer, saved, optimizer)
        del saved["state"][0][slot]
        assert refused(check_optimizer, saved, optimizer)


def test_moments_have_shapes_kinds_and_values_that_occur() -> None:
    optimizer, saved = stepped("Adam")
    for place, value, fits in (
        (("exp_avg",), torch.ones(2, 3).bfloat16(), True),
        (("exp_avg",), -torch.ones(2, 3), True),
        (("exp_avg",), torch.ones(3, 2), False),
        (("exp_avg",), torch.ones(2, 3).long(), False),
        (("exp_avg",), 1.0, False),
        (("exp_avg",), None, False),
        (("exp_avg",), Spread("x", torch.Size((2, 3)), torch.float32), True),
        (("exp_avg_sq",), torch.zeros(2, 3), True),
        (("exp_avg_sq",), -torch.ones(2, 3), False),
        (("exp_avg_sq",), torch.ones(2, 3).long(), False),
        (("step",), 3, True),
        (("step",), 0, True),
        (("step",), torch.tensor(3.0), True),
        (("step",), torch.tensor([3.0]), True),
        (("step",), torch.tensor(3), False),
        (("step",), torch.ones(2), False),
        (("step",), -1, False),
        (("step",), math.nan, False),
        (("step",), True, False),
        (("step",), None, False),
    ):
        changed = with_value(saved, ("state", 0, *place), value)
        assert refused(check_optimizer, changed, optimizer) is not fits, (place, value)


def test_what_is_no_state_of_this_optimizer() -> None:
    optimizer, saved = stepped("Adam")
    slots = saved["state"][0]
    for changed in (
        {},
        {"state": saved["state"]},
        {"param_groups": saved["param_groups"]},
        {**saved, "param_groups": ()},
        {**saved, "param_groups": [1]},
        {**saved, "param_groups": []},
        {**saved, "state": []},
        {**saved, "state": {3: slots}},
        {**saved, "state": {-1: slots}},
        {**saved, "state": {"0": slots}},
        {**saved, "state": {0: 5}},
        with_value(saved, ("param_groups", 0, "params"), [0, 1]),
        with_value(saved, ("param_groups", 0, "params"), [0, 1, 1]),
        with_value(saved, ("param_groups", 0, "params"), [0, 1, "2"]),
        with_value(saved, ("param_groups", 0, "params"), 3),
        with_value(saved, ("param_groups", 0), {**saved["param_groups"][0], "new": 1}),
    ):
        assert refused(check_optimizer, changed, optimizer), changed


def test_options_are_of_the_kind_they_are_here() -> None:
    optimizer, saved = stepped("Adam")
    for key, value, fits in (
        ("lr", 0.5, True),
        ("lr", 1, True),
        ("lr", torch.tensor(0.5), True),
        ("lr", torch.ones(2), False),
        ("lr", math.inf, False),
        ("lr", -1.0, False),
        ("lr", "0.1", False),
        ("lr", True, False),
        ("betas", (0.5, 0.6), True),
        ("betas", [0.5, 0.6], True),
        ("betas", (0.5, 1.0), False),
        ("betas", (0.5,), False),
        ("betas", (0.5, "0.6"), False),
        ("betas", (0.5, 0.6, 0.7), False),
        ("betas", 0.5, False),
        ("amsgrad", False, True),
        ("amsgrad", 1, False),
        ("foreach", True, True),
        ("foreach", None, True),
    ):
        changed = with_value(saved, ("param_groups", 0, key), value)
        assert refused(check_optimizer, changed, optimizer) is not fits, (key, value)
    for value, fits in ((0.1, True), (1, True), (torch.tensor(0.1), True), ("0.1", False), (None, False)):
        changed = with_value(saved, ("param_groups", 0), {**saved["param_groups"][0], "initial_lr": value})
        assert refused(check_optimizer, changed, optimizer) is not fits, value


class Unknown(torch.optim.Optimizer):
    """Of somebody else: what it keeps is not known."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "name": "x"})


def test_of_an_unknown_optimizer_the_odd_one_out_is_refused() -> None:
    optimizer = Unknown([nn.Parameter(torch.ones(2, 3)) for _ in range(3)])

    def saved(*third: Any, name: str = "m", usual: Any = None) -> dict[str, Any]:
        usual = torch.ones(2, 3) if usual is None else usual
        state = {0: {name: usual}, 1: {name: usual}, 2: {name: third[0]} if third else {"other": 1}}
        return {**optimizer.state_dict(), "state": state}

    alike = torch.ones(2, 3)
    for third, fits in (
        (alike, True),
        (alike.to(torch.uint8), True),  # quantized
        (alike.to(torch.int64), False),
        (torch.ones(3, 2), False),
        (torch.ones(1), False),
        (1.0, False),
        (True, False),
        ("x", False),
        (None, True),
    ):
        assert refused(check_optimizer, saved(third), optimizer) is not fits, third
    assert refused(check_optimizer, saved(), optimizer)
    assert refused(check_optimizer, saved("x", name="step", usual=3), optimizer)
    assert not refused(check_optimizer, saved(4.0, name="step", usual=3), optimizer)
    assert not refused(check_optimizer, saved("x", name="rank", usual=3), optimizer)
    assert not refused(check_optimizer, saved("x", usual=torch.ones(3, 2)), optimizer)
    two = {**optimizer.state_dict(), "state": {0: {"m": alike}, 1: {"m": 1.0}}}
    assert not refused(check_optimizer, two, optimizer)  # too few to tell
    assert refused(check_optimizer, {**two, "state": {7: {"m": alike}}}, optimizer)
    assert not refused(check_optimizer, {**two, "state": {"own": {"m": alike}}}, optimizer)
    assert refused(check_optimizer, with_value(saved(alike), ("param_groups", 0, "name"), 3), optimizer)
    assert not refused(check_optimizer, with_value(saved(alike), ("param_groups", 0, "name"), "y"), optimizer)


def test_the_odd_one_out_is_named_by_its_number() -> None:
    optimizer = Unknown([nn.Parameter(torch.ones(2, 3)) for _ in range(4)])
    for odd in range(4):
        state = {number: {"m": torch.ones(3, 2) if number == odd else torch.ones(2, 3)} for number in range(4)}
        with pytest.raises(CheckpointError, match=f"parameter {odd}: m"):
            check_optimizer({**optimizer.state_dict(), "state": state}, optimizer)


def test_a_buffer_without_a_shape_takes_any() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    saved = dict(nn.Sequential(nn.BatchNorm1d(3)).named_buffers())
    assert list(check_buffers(saved, model)) == []


def test_a_scalar_is_negative_only_where_it_counts_nothing() -> None:
    optimizer, saved = stepped("ASGD")
    assert not refused(check_optimizer, with_value(saved, ("state", 0, "mu"), -0.5), optimizer)
    assert refused(check_optimizer, with_value(saved, ("state", 0, "step"), -0.5), optimizer)


@pytest.mark.parametrize(
    ("saved", "present", "fits"),
    [
        (None, 0.1, True),  # it was not set there
        (0.1, None, True),  # nor is it here
        (None, None, True),
        (None, True, True),
        (True, None, True),
        (True, False, True),
        (True, 0.1, False),
        (1.0, True, False),
        ("a", "b", True),
        ("a", 1.0, False),
        (1.0, "a", False),
        ((1, None), (1, 2), True),
        ((1, True), (1, 2), False),
    ],
)
def test_an_option_is_of_the_same_kind_or_not_set(saved: Any, present: Any, fits: bool) -> None:
    assert refused(_check_option, "group 0: any", saved, present) is not fits
