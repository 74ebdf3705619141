"""What has to be the same on all ranks, and how a difference is put into words."""

import pytest
import torch
from torch import nn

from steadystep.config import Config
from steadystep.parallel.single_process import SECTIONS, checksum, difference, sections


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
