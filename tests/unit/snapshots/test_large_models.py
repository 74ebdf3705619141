"""States of models that are large beside the memory: on disk, at half the size, or none, and what is said of it."""

import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.snapshots import Snapshots
from steadystep.snapshots.placement import Placement, disk_bytes, memory_bytes, place, protection
from steadystep.snapshots.tensor_state import TensorState
from tests.loops import assert_same, batches, full_state, small_net, squared

SIZE = 3 * 4 * sum(p.numel() for p in small_net().parameters())
MEMORY_FOR_NONE, MEMORY_FOR_ONE = 0.5 * SIZE / 2**30, 1.5 * SIZE / 2**30


def rolling(
    tmp_path: Path, *, at: int | None, memory_gb: float, **recovery: object
) -> tuple[dict[str, Tensor], list[steadystep.Outcome], steadystep.Guard]:
    """Weights are damaged at step `at`; the batches since the state are replayed."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"trust_steps": 4, "lr_mult": 1.0, "rewarm_steps": 0, "snapshot_memory_gb": memory_gb, **recovery}
    guard = steadystep.Guard(model, optimizer, config={"recovery": settings}, run_dir=tmp_path)
    outcomes = []
    torch.manual_seed(5)
    for i, x in enumerate(batches(60)):
        if i == at:
            with torch.no_grad():
                next(model.parameters()).mul_(1e30)
        outcomes.append(guard.step(lambda x: squared(model, x), batch=x))
    return full_state(model, optimizer), outcomes, guard


@pytest.mark.parametrize(("memory_gb", "on_disk"), [(MEMORY_FOR_NONE, 2), (MEMORY_FOR_ONE, 1)])
def test_a_rollback_from_disk_is_as_exact_as_one_from_memory(tmp_path: Path, memory_gb: float, on_disk: int) -> None:
    expected, *_ = rolling(tmp_path / "clean", at=None, memory_gb=1.0)
    with pytest.warns(UserWarning, match=r"2 instead of 4 .*on disk"):
        got, outcomes, guard = rolling(tmp_path / "broken", at=50, memory_gb=memory_gb)
    assert outcomes[50].restored is not None
    assert guard.updates == 60
    assert_same(expected, got)
    assert [state.file is not None for state in guard._recovery.states].count(True) == on_disk
    # the files have no names: nothing is left behind, whatever happens
    assert list((tmp_path / "broken" / "snapshots").iterdir()) == []


def test_the_disk_can_be_left_alone(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="none is kept"):
        _, outcomes, guard = rolling(tmp_path, at=None, memory_gb=MEMORY_FOR_NONE, snapshot_disk_gb=0.0)
    assert guard._recovery.states == ()
    assert all(outcome.stepped for outcome in outcomes)
    assert not (tmp_path / "snapshots").exists()


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def made(
    folder: Path | None, *, memory: float, disk: float = 1e12
) -> tuple[nn.Module, torch.optim.Optimizer, Snapshots]:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tensor_state = TensorState(model, optimizer, SimpleNamespace(parameters=list(model.parameters())))
    kept = Snapshots(
        tensor_state, count=4, device=torch.device("cpu"), memory_bytes=memory, disk_bytes=1e12, folder=folder
    )
    return model, optimizer, kept


def updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    squared(model, batches(1)[0]).backward()
    optimizer.step()


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_takes_no_more_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    model, optimizer, kept = made(tmp_path, memory=1.5 * SIZE)
    with pytest.warns(UserWarning, match="2 instead of 4"):
        kept.take(step=0, updates=0, lr=0.1, parts={})
    updated(model, optimizer)
    with pytest.warns(UserWarning, match="could not be written"):
        kept.take(step=100, updates=1, lr=0.1, parts={})
    kept.take(step=200, updates=2, lr=0.1, parts={})
    assert [state.step for state in kept.states] == [200]


def test_one_compact_state_gives_weights_exactly_and_moments_to_three_digits() -> None:
    model, optimizer, kept = made(None, memory=0.7 * SIZE)
    updated(model, optimizer)
    with pytest.warns(UserWarning, match=r"1 instead of 4 .*half precision.*with a run_dir"):
        kept.take(step=0, updates=1, lr=0.1, parts={})
    before = full_state(model, optimizer)
    updated(model, optimizer)
    kept.roll_back(0, replay=True)
    after = full_state(model, optimizer)
    weights = [name for name in before if name.startswith("model.")]
    assert_same({name: before[name] for name in weights}, {name: after[name] for name in weights})
    for name in before.keys() - set(weights):
        assert after[name].dtype == before[name].dtype
        torch.testing.assert_close(after[name], before[name], rtol=2**-8, atol=0.0)
    kept_bytes = sum(t.numel() * t.element_size() for t in kept.states[0].tensors.values())
    assert kept_bytes <= 0.7 * SIZE


def test_the_start_says_in_one_line_what_the_memory_buys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="steadystep")
    rolling(tmp_path, at=None, memory_gb=1.0)
    said = [r.message for r in caplog.records if "rollbacks" in r.message]
    assert said == [
        "steadystep: bad updates are skipped; rollbacks use 4 snapshots of 0.00 GiB in memory, one every 4 steps, "
        "trusted after 4"
    ]


def test_without_a_state_checkpoints_are_what_is_left() -> None:
    none = Placement(size=1e9, in_memory=0)
    assert "checkpoints on disk only" in protection(none, interval=20, trust_steps=20, checkpoints=True)
    assert "not possible" in protection(none, interval=20, trust_steps=20, checkpoints=False)


@pytest.mark.parametrize(
    ("memory", "disk", "expected"),
    [
        (4.0, 9.0, (4, 0)),
        (2.5, 9.0, (2, 0)),
        (1.9, 9.0, (1, 1)),
        (0.9, 9.0, (0, 2)),
        (0.9, 1.5, (0, 1)),
        (0.1, 0.0, (0, 0)),
    ],
)
def test_memory_first_then_disk_up_to_two(memory: float, disk: float, expected: tuple[int, int]) -> None:
    placed = place(size=1e9, compact_size=0.7e9, count=4, memory=memory * 1e9, disk=disk * 1e9)
    assert (placed.in_memory, placed.on_disk) == expected


def test_processes_of_one_machine_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = memory_bytes(None), disk_bytes(None, tmp_path / "not" / "there")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory_bytes(None) == alone[0] / 8
    assert disk_bytes(None, tmp_path) == pytest.approx(alone[1] / 8, rel=0.2)
    assert (memory_bytes(2.0), disk_bytes(3.0, tmp_path), disk_bytes(3.0, None)) == (2.0 * 2**30, 3.0 * 2**30, 0.0)
