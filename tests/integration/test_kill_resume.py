"""Real processes that are killed, terminated, interrupted or out of disk, and go on as if nothing had happened."""

import gc
import logging
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import steadystep
from steadystep.checkpoints.store import CheckpointStore
from steadystep.policy import EarlyStopping

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from kill_resume import study, summary
from killing.jobs import Job
from killing.moments import Moment
from killing.nursery import Ended, Nursery
from killing.trial import Whole, killed_and_resumed, whole
from killing.variants import Variant

RARE = Variant(frequency=1000, accumulate=2, epochs=2)  # only what a signal asks for is saved
OFTEN = Variant(frequency=2, keep=1, loader="stream", schedule="plateau")


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A shell starts what it runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


@pytest.fixture(scope="module")
def rare(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return whole(nursery, RARE, tmp_path_factory.mktemp("rare"))


def run(nursery: Nursery, folder: Path, *moments: Moment, variant: Variant = RARE, **settings: Any) -> Ended:
    job = Job(variant=variant, desk=str(folder / "desk"), folder=str(folder / "run"), moments=moments, **settings)
    return nursery.run(job)


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_ten_killed_runs_end_like_the_one_that_was_not(nursery: Nursery, tmp_path: Path) -> None:
    found = summary(study(nursery, 10, 0, tmp_path))
    assert found["wrong"] == []
    assert (found["runs"], found["equal"], found["unreadable"]) == (10, 10, 0)
    assert found["kills"] >= 10
    assert found["half_written"] >= 1


@pytest.mark.slow
def test_a_difference_would_be_seen(nursery: Nursery, rare: Whole, tmp_path: Path) -> None:
    other = nursery.run(Job(variant=Variant(frequency=1000, accumulate=2, epochs=2, seed=1), desk=str(tmp_path)))
    assert other.result is not None
    same = [name for name, value in other.result["parts"].items() if value == rare.parts[name]]
    assert same == ["updates"]
    wrong = Whole(variant=RARE, parts=other.result["parts"], counts=rare.counts, seconds=rare.seconds)
    told = killed_and_resumed(nursery, wrong, tmp_path, kind="backward", rng=random.Random(0))
    assert "backward" in told.kills
    assert not told.equal
    assert {"weights", "losses", "random"} <= set(told.wrong)


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_asked_to_end_it_finishes_the_step_and_saves(
    nursery: Nursery, rare: Whole, tmp_path: Path, asked: int, code: int
) -> None:
    ended = run(nursery, tmp_path, Moment("backward", 7, asked))  # the first half of an update of two
    assert ended.code == code
    assert f"{signal.Signals(asked).name}: finishing this step and saving" in ended.said
    assert "saved a checkpoint of step 4" in ended.said
    assert there(tmp_path) == ["step-00000004"]
    again = run(nursery, tmp_path)
    assert again.result is not None, again.said
    assert (again.result["began"], again.result["parts"]) == (4, rare.parts)


def test_asked_twice_it_ends_at_once(nursery: Nursery, rare: Whole, tmp_path: Path) -> None:
    ended = run(nursery, tmp_path, *(Moment(kind, 7, signal.SIGINT) for kind in ("forward", "backward")))
    assert ended.code == -signal.SIGINT
    assert "saved" not in ended.said
    assert there(tmp_path) == []
    again = run(nursery, tmp_path)
    assert again.result is not None, again.said
    assert again.result["parts"] == rare.parts


def test_asked_after_the_last_step_it_saves_and_ends_too(nursery: Nursery, rare: Whole, tmp_path: Path) -> None:
    ended = run(nursery, tmp_path, Moment("a validation", 2, signal.SIGTERM))
    assert ended.code == 143
    assert "saved a checkpoint of step 12" in ended.said
    again = run(nursery, tmp_path)
    assert again.result is not None, again.said
    assert (again.result["began"], again.result["parts"]) == (12, rare.parts)


@pytest.mark.slow
def test_asked_while_a_checkpoint_is_written_and_a_finished_run_has_nothing_left(
    nursery: Nursery, tmp_path: Path
) -> None:
    expected = whole(nursery, OFTEN, tmp_path / "whole")
    ended = run(nursery, tmp_path, Moment("half a write", 30, signal.SIGTERM), variant=OFTEN)
    assert ended.code == 143
    assert "saved a checkpoint of step" in ended.said
    assert [name for name in there(tmp_path) if name.startswith(".")] == []
    for began_late in (False, True):
        again = run(nursery, tmp_path, variant=OFTEN)
        assert again.result is not None, again.said
        assert again.result["parts"] == expected.parts
        assert (again.result["began"] == again.result["steps"]) is began_late


def test_a_full_disk_is_said_once_and_the_old_checkpoint_stays(nursery: Nursery, tmp_path: Path) -> None:
    expected = whole(nursery, OFTEN, tmp_path / "whole")
    run(nursery, tmp_path, Moment("backward", 7, signal.SIGTERM), variant=OFTEN)
    before = there(tmp_path)
    assert len(before) == 1
    full = run(nursery, tmp_path, variant=OFTEN, largest_file=4096)
    assert full.result is not None, full.said
    assert full.result["parts"] == expected.parts
    assert full.said.count("could not be written (File too large)") == 1
    assert full.said.count("training continues without new checkpoints; older ones are kept") == 1
    assert there(tmp_path) == before
    again = run(nursery, tmp_path, variant=OFTEN)
    assert again.result is not None, again.said
    assert (again.result["began"], again.result["parts"]) == (7, expected.parts)


# in this process


DATA = list(torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0)).unbind(0))


def made(folder: Path | None, *, frequency: int = 1, **settings: Any) -> tuple[nn.Module, steadystep.Guard]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if folder is None:
        return model, steadystep.Guard(model, optimizer)
    config = {"monitoring": {"checkpoint_frequency": frequency}}
    return model, steadystep.Guard.resume(model, optimizer, run_dir=folder, config=config, **settings)


def step(model: nn.Module, guard: steadystep.Guard, batch: Tensor) -> None:
    guard.step(lambda x: (model(x) * torch.rand(1)).square().mean(), batch=batch)


class Seeded:
    """A loader with a state of its own that draws a number when a pass begins, as torchdata's does."""

    def __init__(self) -> None:
        self.used = 0

    def __iter__(self) -> Iterator[Tensor]:
        torch.rand(1)
        return self._rest()

    def _rest(self) -> Iterator[Tensor]:
        while self.used < len(DATA):
            self.used += 1
            yield DATA[self.used - 1]
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


@pytest.mark.parametrize("stop", [2, 5])
def test_a_loader_with_a_state_of_its_own_is_asked_and_draws_nothing_twice(tmp_path: Path, stop: int) -> None:
    def train(folder: Path | None, stop: int | None) -> Tensor:
        model, guard = made(folder)
        for batch in guard.batches(Seeded()):
            if guard.attempts == stop:
                guard._run_state.checkpoints.flush()
                return model.weight
            step(model, guard, batch)
        guard.close()
        return model.weight.detach().clone()

    expected = train(None, None)
    train(tmp_path, stop)
    assert torch.equal(train(tmp_path, None), expected)


def test_a_pass_that_is_left_early_is_over_when_the_next_one_begins(tmp_path: Path) -> None:
    def train(folder: Path | None, stop: int | None) -> Tensor:
        model, guard = made(folder)
        for _ in range(guard.epoch, 3):
            for batch in guard.batches(DATA):
                if guard.attempts == stop:
                    guard._run_state.checkpoints.flush()
                    return model.weight
                step(model, guard, batch)
                if guard.attempts % 3 == 0:
                    if folder is not None:
                        guard._run_state.checkpoints.flush()
                    break
        guard.close()
        return model.weight.detach().clone()

    expected = train(None, None)
    train(tmp_path, 3)
    assert there_steps(tmp_path)[-1] == 3
    assert torch.equal(train(tmp_path, None), expected)


@pytest.mark.parametrize("stop", [5, 8])  # where a pass begins, and in the middle of one that is not the first
@pytest.mark.parametrize("kind", ["workers", "generator"])
def test_what_a_loader_takes_from_pass_to_pass(tmp_path: Path, kind: str, stop: int) -> None:
    def train(folder: Path | None, stop: int | None) -> Tensor:
        model, guard = made(folder)
        loader = lasting(kind)
        for _ in range(guard.epoch, 2):
            for batch in guard.batches(loader):
                if guard.attempts == stop:
                    guard._run_state.checkpoints.flush()
                    return model.weight
                step(model, guard, batch)
                if folder is not None:
                    guard._run_state.checkpoints.flush()
            guard.validate(val_loss=1.0)  # saved when the next pass begins
        guard.close()
        return model.weight.detach().clone()

    expected = train(None, None)
    train(tmp_path, stop)
    assert there_steps(tmp_path)[-1] == stop
    assert torch.equal(train(tmp_path, None), expected)


@pytest.mark.parametrize("kind", ["workers", "generator"])
def test_saved_between_two_passes(tmp_path: Path, kind: str) -> None:
    def train(folder: Path, epochs: int) -> Tensor:
        model, guard = made(folder, frequency=1000)
        loader = lasting(kind)
        for _ in range(guard.epoch, epochs):
            for batch in guard.batches(loader):
                step(model, guard, batch)
        guard.close()
        return model.weight.detach().clone()

    expected = train(tmp_path / "whole", 2)
    train(tmp_path / "halves", 1)
    assert torch.equal(train(tmp_path / "halves", 2), expected)


def lasting(kind: str) -> DataLoader:
    rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    if kind == "workers":
        return DataLoader(rows, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    return DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


def test_a_loop_without_batches_and_its_random_numbers(tmp_path: Path) -> None:
    def train(folder: Path, stop: int) -> Tensor:
        model, guard = made(folder)
        for batch in DATA[guard.attempts : stop]:
            step(model, guard, batch)
        guard.close()
        return model.weight.detach().clone()

    expected = train(tmp_path / "whole", 8)
    train(tmp_path / "parts", 3)
    assert torch.equal(train(tmp_path / "parts", 8), expected)


def test_less_data_than_there_was_is_said(tmp_path: Path) -> None:
    model, guard = made(tmp_path)
    for batch in guard.batches(DATA):
        step(model, guard, batch)
        if guard.attempts == 5:
            break
    guard.close()
    _, guard = made(tmp_path)
    with pytest.warns(UserWarning, match="the loader ended after 2 batches, but 5 had been used"):
        assert list(guard.batches(DATA[:2])) == []
    guard.close()


def test_the_best_weights_may_be_the_present_ones(tmp_path: Path) -> None:
    model, guard = made(tmp_path, frequency=1000)
    step(model, guard, DATA[0])
    guard.validate(val_loss=1.0)
    best = model.weight.detach().clone()
    assert guard.restore_best()
    assert torch.equal(model.weight, best)
    guard.close()


def test_minus_infinity_is_no_improvement() -> None:
    early = EarlyStopping(patience=1)
    assert [early.update(loss) for loss in (float("-inf"), 1.0, float("-inf"))] == [False, True, False]


@pytest.mark.parametrize("asked", [False, True])  # saved before a batch was asked for, or as the first one is
def test_resumed_saved_at_once_and_resumed_again(tmp_path: Path, asked: bool) -> None:
    def train(folder: Path, stop: int | None, *, asks: bool = True, **settings: Any) -> Tensor:
        model, guard = made(folder, **settings)
        if asks:
            nn.Linear(9, 9)  # draws random numbers
            for batch in guard.batches(DATA):
                if stop == 0:
                    break
                step(model, guard, batch)
                if guard.attempts == stop:
                    break
        guard.close()
        return model.weight.detach().clone()

    expected = train(tmp_path / "whole", None)
    train(tmp_path / "a", 3)
    train(tmp_path / "b", 0, asks=asked, path=tmp_path / "a")
    again = train(tmp_path / "c", None, path=tmp_path / "b")
    assert torch.equal(again, expected)


def test_a_state_that_nobody_keeps_any_more_is_said(tmp_path: Path) -> None:
    model, guard = made(tmp_path)
    guard.keep("ema", torch.optim.swa_utils.AveragedModel(model))
    step(model, guard, DATA[0])
    guard.close()
    model, guard = made(tmp_path)
    with pytest.warns(UserWarning, match="a state of 'ema', and nothing is registered under that name"):
        guard.save(tmp_path / "elsewhere")
    guard.save(tmp_path / "again")  # said once


def there_steps(folder: Path) -> list[int]:
    return CheckpointStore(folder / "checkpoints").steps()


def test_what_is_ignored_on_purpose_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ending = signal.getsignal(signal.SIGTERM)  # a guard that another test has left open may listen
    try:
        _, guard = made(tmp_path)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        guard.close()
        assert signal.getsignal(signal.SIGTERM) == ending
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_guard_that_is_gone_does_not_keep_ctrl_c(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    model, guard = made(tmp_path / "dropped")
    assert signal.getsignal(signal.SIGINT) != before
    del model, guard
    gc.collect()
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_several_guards_are_closed_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    before = signal.getsignal(signal.SIGINT)
    guards = [made(tmp_path / str(number))[1] for number in range(3)]
    for number in order:
        assert signal.getsignal(signal.SIGINT) != before
        guards[number].close()
    assert signal.getsignal(signal.SIGINT) == before


def test_it_does_not_say_saved_when_it_was_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, guard = made(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").touch()
    step(model, guard, DATA[0])
    os.kill(os.getpid(), signal.SIGINT)
    with (
        caplog.at_level(logging.WARNING),
        pytest.warns(UserWarning, match="could not be written"),
        pytest.raises(KeyboardInterrupt),
    ):
        step(model, guard, DATA[1])
    assert "step 1 was not saved in" in caplog.text
    assert "saved a checkpoint" not in caplog.text
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints").mkdir()
    with pytest.warns(UserWarning, match="again"):  # the same step is tried once more
        guard.close()
    assert there_steps(tmp_path) == [1]


def test_nothing_is_gathered_while_the_last_one_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, guard = made(tmp_path)
    checkpoints = guard._run_state.checkpoints
    monkeypatch.setattr(type(checkpoints._writer), "busy", property(lambda _: True))
    monkeypatch.setattr(type(guard._run_state.loop), "gather", lambda _: pytest.fail("gathered"))
    for batch in DATA[:3]:
        step(model, guard, batch)
    monkeypatch.undo()
    guard.close()
