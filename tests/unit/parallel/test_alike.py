"""What has to be the same on all ranks, and how a difference is put into words."""

import pytest
import torch
from torch import nn

from steadystep.config import Config
from steadystep.parallel.messages import SECTIONS, checksum, difference, sections
from steadystep.parallel.single_process import SingleProcess


def told(
    *, config: dict[str, object] | None = None, size: int = 3, lr: float = 0.1, mask: int = 2
) -> dict[str, dict[str, str]]:
    model = nn.Sequential(nn.Linear(2, size), nn.BatchNorm1d(size))
    model.register_buffer("mask", torch.ones(mask))
    found = sections(Config.load(config), model, torch.optim.SGD(model.parameters(), lr=lr))
    return {name: dict(section) for name, section in found.items()}


@pytest.mark.parametrize(
    ("section", "other", "says"),
    [
        ("settings", {"config": {"mode": "observe"}}, "mode is 'autopilot' on rank 0 and 'observe' on rank 1"),
        (
            "settings",
            {"config": {"training": {"gradient_accumulation_steps": 2}}},
            "training.gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1",
        ),
        ("parameters", {"size": 4}, r"0.weight is \[3, 2\] float32 on rank 0 and \[4, 2\] float32 on rank 1"),
        ("buffers", {"mask": 5}, r"mask is \[2\] float32 on rank 0 and \[5\] float32 on rank 1"),
        ("optimizer", {"lr": 0.2}, "group 0 lr is 0.1 on rank 0 and 0.2 on rank 1"),
    ],
)
def test_what_differs_is_named(section: str, other: dict[str, object], says: str) -> None:
    one, two = told(), told(**other)  # type: ignore[arg-type]
    odd = [name for name in SECTIONS if checksum(one[name]) != checksum(two[name])]
    assert section in odd
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(difference(section, [one[section], two[section]]))


def test_what_each_rank_may_have_of_its_own_is_no_difference() -> None:
    own = {"monitoring": {"sinks": ["console"], "log_frequency": 7}, "recovery": {"snapshot_memory_gb": 3.0}}
    assert told() == told(config=own)


def test_many_ranks_and_many_names_stay_one_line() -> None:
    every = [{f"p{i}": str(rank % 2) for i in range(9)} for rank in range(12)]
    said = difference("parameters", every)
    assert said.startswith(
        "parameters: p0 is 0 on ranks 0, 2, 4, 6 and 2 more and 1 on ranks 1, 3, 5, 7 and 2 more; p1"
    )
    assert said.endswith("; and 6 more")


@pytest.mark.parametrize(
    ("count", "shown", "more"), [(1, [0], None), (4, [0, 1, 2, 3], None), (5, [0, 1, 2, 3], 1), (6, [0, 1, 2, 3], 2)]
)
def test_ranks_are_listed_up_to_four(count: int, shown: list[int], more: int | None) -> None:
    """All that say the same; one more rank says something else."""
    said = difference("settings", [{"mode": "same"}] * count + [{"mode": "other"}])
    listed = said.partition("same on")[2].partition("other on")[0]
    assert [int(digit) for digit in listed if digit.isdigit()] == shown + ([] if more is None else [more])


@pytest.mark.parametrize(("odd", "more"), [("a", None), ("abc", None), ("abcde", 2), ("abcdefghi", 6)])
def test_names_are_listed_up_to_three(odd: str, more: int | None) -> None:
    every = [{"alike": "x"} | {f"name-{letter}": value for letter in odd} for value in ("yes", "no")]
    said = difference("parameters", every)
    assert "alike" not in said
    assert [letter for letter in odd if f"name-{letter}" in said] == [*odd[:3]]
    assert {int(digit) for digit in said if digit.isdigit()} == {0, 1} | ({more} if more else set())


def test_what_one_rank_lacks_is_a_difference() -> None:
    said = difference("buffers", [{"mask": "[2]"}, {}])
    assert "mask" in said
    assert "[2]" in said


def test_a_checksum_is_of_the_content_and_exact_as_a_float() -> None:
    assert checksum({"a": "1", "b": "2"}) == checksum({"b": "2", "a": "1"})
    numbers = {checksum({"a": str(value)}) for value in range(200)}
    assert len(numbers) == 200
    assert max(numbers).bit_length() == 52
    assert all(float(number) == number >= 0 for number in numbers)


def test_sections_name_everything() -> None:
    class Mine:
        name = "my-detector"

    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(
        [{"params": [model.weight], "lr": torch.tensor(0.5)}, {"params": [model.bias], "note": [1], "flag": None}]
    )
    found = sections(Config.load(None), model, optimizer, [Mine(), "plain"])
    assert tuple(found) == SECTIONS
    assert found["detectors"] == {"0": "my-detector", "1": "plain"}
    assert found["parameters"] == {"weight": "[3, 2] float32", "bias": "[3] float32"}
    assert found["versions"]["torch"] == torch.__version__.split("+")[0]
    options = found["optimizer"]
    assert options["kind"] == "Adam"
    assert (options["group 0 parameters"], options["group 1 parameters"]) == ("1", "1")
    assert (options["group 0 lr"], options["group 1 lr"]) == ("0.5", "0.001")
    assert options["group 1 betas"] == "(0.9, 0.999)"
    assert options["group 1 flag"] == "None"
    assert "group 1 note" not in options
    assert "group 0 params" not in options


def test_parameters_that_are_not_made_yet_have_no_shape() -> None:
    lazy = nn.LazyLinear(3)
    found = sections(Config.load(None), lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    assert set(found["parameters"]) == {"weight", "bias"}
    assert "[" not in "".join(found["parameters"].values())


def test_one_process_agrees_with_itself() -> None:
    alone = SingleProcess()
    view: object = object()
    assert alone.agree(view) is view  # type: ignore[arg-type, comparison-overlap]
    wish = alone.any_rank(lambda: True)
    assert wish()
    done: list[int] = []
    alone.on_all(lambda: done.append(1))()
    assert done == [1]
    assert (alone.all(True), alone.all(False), alone.same("anything")) == (True, False, True)
    assert (alone.mean((1.0, 2.0)), alone.least(3.0), alone.validation(4.0)) == ([1.0, 2.0], 3.0, 4.0)
    assert (alone.texts("a"), alone.compare({}), alone.compare({}, wrong="no")) == (["a"], "", "no")
    assert (alone.rank, alone.size, alone.sharded, alone.agreements, alone.adds_up) == (0, 1, False, 0, False)
    with alone.no_sync(), alone.unreduced():
        pass
