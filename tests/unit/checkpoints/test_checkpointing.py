"""When a state goes to disk, and which of them a run goes back to."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadystep.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from steadystep.checkpoints.checkpointing import Checkpointing, Every, Interrupts, none_is_lost, read_any
from steadystep.checkpoints.finite import FiniteParts, KeptTensors, bad_names, not_finite, said
from steadystep.errors import CheckpointError
from steadystep.parallel import SingleProcess


class Loop:
    """Stands for the state of a loop."""

    gathered = 0

    def gather(self) -> dict[str, Any]:
        self.gathered += 1
        return {"number": self.gathered}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(tmp_path: Path, every: Every, **more: Any) -> tuple[Checkpointing, Loop]:
    loop = Loop()
    return Checkpointing(tmp_path, loop, every, **more), loop


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def between(checkpointing: Checkpointing, step: int) -> None:
    """With a number of updates that is not the step."""
    checkpointing.between(step, 100 + step)
    checkpointing.flush()


def test_every_so_many_steps(tmp_path: Path) -> None:
    checkpointing, _ = made(tmp_path, Every(steps=3), keep_last=9)
    for step in range(1, 11):
        between(checkpointing, step)
    assert checkpointing.folder == tmp_path
    assert saved(tmp_path) == [3, 6, 9]
    found = read_checkpoint(tmp_path / "step-00000006")
    assert (found.step, found.updates, found.score, found.state) == (6, 106, None, {"number": 2})
    assert checkpointing.flush() == tmp_path / "step-00000009"
    checkpointing.close(10, 110, save=True)
    assert saved(tmp_path) == [3, 6, 9, 10]


def test_every_so_many_seconds(tmp_path: Path) -> None:
    clock = Clock()
    checkpointing, _ = made(tmp_path, Every(seconds=60.0), clock=clock)
    for step, now in ((1, 159.9), (2, 160.0), (3, 219.9), (4, 220.0)):
        clock.now = now
        between(checkpointing, step)
    assert saved(tmp_path) == [2, 4]
    checkpointing.close(5, 5, save=False)
    assert saved(tmp_path) == [2, 4]


def test_the_best_validation_so_far_is_saved_with_its_score(tmp_path: Path) -> None:
    checkpointing, _ = made(tmp_path, Every(steps=100))
    checkpointing.validated(0.5)
    between(checkpointing, 1)
    between(checkpointing, 2)
    assert saved(tmp_path) == [1]
    best = checkpointing.best()
    assert (best.step, best.score) == (1, 0.5)
    checkpointing.validated(0.25)
    checkpointing.save(1, 101)  # the same step again, now with a score
    assert checkpointing.best().score == 0.25
    checkpointing.close(1, 101, save=True)


def test_a_step_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    checkpointing, loop = made(tmp_path, Every(steps=100))
    checkpointing.save(4, 4, wait=True)
    checkpointing.flush()
    checkpointing.save(4, 4, wait=True)
    assert loop.gathered == 1
    (tmp_path / "step-00000004").rename(tmp_path / "elsewhere")
    checkpointing.save(4, 4, wait=True)
    assert loop.gathered == 2
    checkpointing.close(0, 0, save=True)  # before the first step there is nothing to save
    assert saved(tmp_path) == [4]


def test_only_those_of_this_run_and_what_it_was_resumed_from(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"number": 0}, step=2, updates=2)
    checkpointing, _ = made(tmp_path, Every(steps=100), keep_last=9)
    assert checkpointing.newest().step == 2
    write_checkpoint(tmp_path, {"number": 0}, step=7, updates=7)  # somebody else's
    assert checkpointing.newest_of_this_run().step == 2
    checkpointing.save(5, 5, wait=True)
    assert checkpointing.newest_of_this_run().step == 5
    checkpointing.close(5, 5, save=False)
    alone, _ = made(tmp_path, Every(steps=100), keep_last=9)
    assert alone.newest_of_this_run() is None  # neither written nor resumed anything
    alone.close(5, 5, save=False)


def test_after_a_resume_the_next_one_is_counted_from_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"number": 0}, step=10, updates=10)
    checkpointing, _ = made(tmp_path, Every(steps=3), keep_last=9)
    checkpointing.newest()
    for step in (11, 12, 13):
        between(checkpointing, step)
    assert saved(tmp_path) == [10, 13]
    checkpointing.close(13, 13, save=False)


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Guards of other tests may be listening in this process: as if none had been there."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("plain_signals")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_saves_and_then_does_what_it_does(tmp_path: Path, number: int, error: type) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    checkpointing, _ = made(tmp_path, Every(steps=100))
    between(checkpointing, 1)
    signal.raise_signal(number)
    with pytest.raises(error):
        checkpointing.between(2, 2)
    assert saved(tmp_path) == [2]
    checkpointing.close(2, 2, save=False)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.usefixtures("plain_signals")
def test_a_signal_after_the_last_step_is_obeyed_at_the_end(tmp_path: Path) -> None:
    checkpointing, _ = made(tmp_path, Every(steps=100))
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        checkpointing.close(3, 3, save=True)
    assert saved(tmp_path) == [3]


@pytest.mark.usefixtures("plain_signals")
def test_the_second_signal_acts_at_once_and_the_exit_code_is_the_systems() -> None:
    interrupts = Interrupts()
    interrupts.install()
    signal.raise_signal(signal.SIGTERM)
    assert interrupts.asked == signal.SIGTERM
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert interrupts.asked is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_listeners_are_taken_out_in_any_order() -> None:
    before = signal.getsignal(signal.SIGINT)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        all_three = [Interrupts() for _ in range(3)]
        for one in all_three:
            one.install()
        for place in order:
            all_three[place].remove()
        assert signal.getsignal(signal.SIGINT) is before
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    one = Interrupts()
    one.install()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    one.remove()
    signal.signal(signal.SIGINT, ignored)


def test_a_checkpoint_or_the_newest_of_a_folder(tmp_path: Path) -> None:
    ranks = SingleProcess()
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError):
        read_any(run, ranks)
    with pytest.raises(CheckpointError):
        read_any(tmp_path / "nowhere", ranks)
    assert not (tmp_path / "nowhere").exists()
    path = write_checkpoint(run / "checkpoints", {"number": 0}, step=2, updates=2)
    write_checkpoint(run / "checkpoints", {"number": 0}, step=3, updates=3)
    assert [read_any(where, ranks).step for where in (path, run, run / "checkpoints")] == [2, 3, 3]


def test_where_none_can_be_used_nothing_begins_anew(tmp_path: Path) -> None:
    none_is_lost(tmp_path, SingleProcess())
    for step in (2, 3):
        (tmp_path / f"step-0000000{step}").mkdir()
    with pytest.raises(CheckpointError, match="step-00000003"):
        none_is_lost(tmp_path, SingleProcess())


def spoiled(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([1.0, value]) for name, value in values.items()}


INF, NAN = float("inf"), float("nan")


def test_names_of_what_is_not_finite() -> None:
    held = spoiled(good=2.0, inf=INF, minus=-INF, nan=NAN, large=1e38, end=torch.finfo(torch.float32).max)
    held |= {"whole": torch.tensor([5]), "empty": torch.zeros(0), "half": torch.tensor([INF]).bfloat16()}
    held |= {"half end": torch.full((1,), torch.finfo(torch.float16).max, dtype=torch.float16)}
    assert bad_names(held) == ("inf", "minus", "nan", "half")
    assert bad_names(held, absurd=True) == ("inf", "minus", "nan", "large", "half")
    assert bad_names({}) == bad_names({"whole": torch.tensor([5])}) == ()


def test_which_tensors_of_a_state_are_to_be_finite() -> None:
    names = ("parameters.a", "parameters.b", "optimizer.state[0].m", "buffers.x", "buffers.y", "kept.e.w", "kept.e.v")
    tensors = {name: torch.tensor([NAN]) for name in (*names, "data.began")}
    rules = {"infinite": ["b"], "buffers": ["x"], "kept": ["kept.e.w"]}
    assert not_finite(tensors, {"finite": rules}) == (names[0], names[2], "buffers.x", "kept.e.w")
    assert not_finite(tensors, {"finite": {}}) == names[:3]
    assert not_finite(tensors, {}) == not_finite(tensors, []) == names[:3]  # of an older version
    for wrong in (5, {"infinite": "b"}, {"buffers": [1]}, {"kept": ("a",)}):
        with pytest.raises(CheckpointError):
            not_finite(tensors, {"finite": wrong})


def test_the_first_three_are_named() -> None:
    assert [said("abc"[:count]) for count in (1, 2, 3)] == ["a", "a, b", "a, b, c"]
    assert said("abcde").startswith("a, b, c")
    assert "2" in said("abcde")
    assert "d" not in said("abcde").replace("and", "")


def test_parameters_that_are_infinite_or_huge_on_purpose() -> None:
    model = nn.ParameterDict(spoiled(good=1.0, inf=INF, nan=NAN, huge=1e30))
    model["both"] = nn.Parameter(torch.tensor([INF, NAN]))
    model["fp16"] = nn.Parameter(torch.tensor([60000.0, 60000.0], dtype=torch.float16))
    model["fp64"] = nn.Parameter(torch.tensor([1e100], dtype=torch.float64))
    model["empty"] = nn.Parameter(torch.zeros(0))
    model["meta"] = nn.Parameter(torch.ones(1, device="meta"))
    parts = FiniteParts(model, lambda: ["x"])
    assert parts.infinite == {"inf"}
    assert parts.without_norm == {"inf", "huge"}
    assert parts.saved() == {"infinite": ["inf"], "buffers": ["x"], "kept": []}


class Thing:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


def test_tensors_of_kept_objects_that_were_finite_at_first() -> None:
    kept = KeptTensors()
    assert kept.tensors() == {}
    ema = Thing(**spoiled(w=1.0, v=INF), n=torch.tensor([1]), rest=[torch.ones(1)])
    kept.add("ema", ema)
    kept.add("ema2", Thing(w=torch.ones(1)))
    assert kept.names == ("kept.ema.w", "kept.ema.rest[0]", "kept.ema2.w")
    assert kept.tensors().keys() == set(kept.names)
    assert kept.tensors()["kept.ema.w"].data_ptr() == ema.state["w"].data_ptr()
    kept.add("ema", Thing(x=torch.ones(1)))
    assert kept.names == ("kept.ema2.w", "kept.ema.x")
    kept.add("odd", Thing(x=object()))  # has no form in a file
    assert kept.names == ("kept.ema2.w", "kept.ema.x")
    assert kept.tensors() == {}
