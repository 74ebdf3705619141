"""Which state makes room for the next one, case by case."""

import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from steadystep.snapshots.placement import Placement, disk_bytes, interval_mult, memory_bytes, protection, to_replace


@pytest.mark.parametrize(
    ("steps", "now", "expected"),
    [
        # two: the older one once it is more than two intervals old
        ([80, 120], 160, 1),
        ([80, 120], 161, 0),
        ([0, 20], 80, 1),
        # untrained weights first
        ([-1, 40], 60, 0),
        ([-1, 40, 80], 120, 0),
        ([0, 40, 80], 120, 1),
        # three: the oldest after eight intervals, if the next one is five old
        ([0, 100, 200], 320, 1),
        ([0, 121, 200], 320, 1),
        ([0, 121, 200], 321, 0),
        ([0, 122, 200], 321, 2),
        ([0, 300, 310], 321, 2),
        # more: instead of the newest the one before it
        ([0, 160, 280, 300], 321, 2),
        ([0, 160, 240, 280, 300], 321, 3),
        ([0, 120, 280, 300], 321, 0),
        ([0, 160, 280, 300], 320, 1),
    ],
)
def test_by_age(steps: list[int], now: int, expected: int) -> None:
    assert to_replace(steps, now=now, interval=40) == expected


@pytest.mark.parametrize(
    ("steps", "now", "since", "expected"),
    [
        ([0, 40, 80], 120, 60, 0),  # 40 is set aside; of the others the older one is too old
        ([0, 40, 80], 80, 60, 2),
        ([0, 40, 80], 120, 40, 2),  # 40 is not from before; 0 is set aside
        ([0, 40, 80], 121, 40, 1),
        ([0, 40, 80], 120, 0, 1),  # none is from before
        ([-1, 40, 80], 120, 41, 0),
        ([-1, 40], 60, 20, 1),
        ([0, 40], 120, 20, 1),
        ([0, 40], 121, 20, 0),  # three intervals: the other one would never become trusted
    ],
)
def test_the_last_one_before_a_suspicion_is_set_aside(steps: list[int], now: int, since: int, expected: int) -> None:
    assert to_replace(steps, now=now, interval=40, suspected_since=since) == expected


def test_the_interval_grows_with_the_size_and_with_fewer_states() -> None:
    mib = 2**20
    sizes = [0, 64 * mib, 64 * mib + 1, 512 * mib, 512 * mib + 1, 4096 * mib, 4096 * mib + 1]
    assert [interval_mult(size, 4) for size in sizes] == [1, 1, 2, 2, 4, 4, 8]
    assert [interval_mult(size, 2) for size in sizes] == [2, 2, 2, 2, 4, 4, 8]
    assert [interval_mult(size, 1) for size in sizes] == [8] * 7


@pytest.mark.parametrize(("processes", "share"), [("", 4.0), ("1", 4.0), ("2", 8.0), ("0", 4.0), ("many", 4.0)])
def test_a_quarter_of_the_machine_for_all_its_processes(
    processes: str, share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes) if processes else monkeypatch.delenv("LOCAL_WORLD_SIZE", False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8000))
    assert memory_bytes(None) == 4096 * 1000 / share
    assert disk_bytes(None, tmp_path / "not" / "there") == 8000 / share
    assert (memory_bytes(2.0), disk_bytes(2.0, tmp_path)) == (2.0 * 2**30, 2.0 * 2**30)
    assert disk_bytes(2.0, None) == 0.0


def test_a_machine_that_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_: object) -> int:
        raise OSError

    monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert memory_bytes(None) == math.inf
    assert disk_bytes(None, tmp_path) == 0.0


def test_protection_in_one_line() -> None:
    def said(*, checkpoints: bool = False, **more: int | bool) -> str:
        placed = Placement(**{"size": 2**29, "in_memory": 0} | more)  # type: ignore[arg-type]
        return protection(placed, interval=40, trust_steps=20, checkpoints=checkpoints)

    assert said() == "bad updates are skipped; rollbacks are not possible: no snapshot fits"
    assert said(checkpoints=True) == "bad updates are skipped; rollbacks use checkpoints on disk only"
    some = said(in_memory=1, on_disk=2, is_compact=True, checkpoints=True)
    assert (
        "use 1 snapshot of 0.50 GiB in memory and 2 snapshots of 0.50 GiB on disk (moments in half precision)" in some
    )
    assert some.endswith(", one every 40 steps, trusted after 20, and checkpoints")
