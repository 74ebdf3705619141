"""Saving, resuming, and the best weights, without a training loop."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.checkpoints.checkpointing import read_any
from steadystep.engine.parts import BestWeights, Parts, RunState
from steadystep.errors import CheckpointError, MisuseError
from steadystep.parallel import SingleProcess
from steadystep.policy import EarlyStopping


class Loop:
    """Weights that can be read and put back."""

    def __init__(self) -> None:
        self.weight = torch.ones(3)
        self.state: dict[str, Any] = {"parameters": {"w": self.weight}, "step": 4}
        self.put: list[Any] = []

    def weights(self) -> dict[str, dict[str, Tensor]]:
        return {"parameters": {"w": self.weight}, "buffers": {}}

    def put_weights_back(self, state: dict[str, Any]) -> None:
        self.put.append(state)

    def put_back(self, state: dict[str, Any]) -> None:
        self.put.append(state)

    def gather(self) -> dict[str, Any]:
        return self.state


class Checkpoints:
    """Notes what it is asked to do."""

    def __init__(self, path: Path | None = None, found: Any = None) -> None:
        self.asked: list[Any] = []
        self._path, self._found = path, found

    def between(self, *args: Any) -> None:
        self.asked.append(("between", *args))

    def validated(self, loss: float) -> None:
        self.asked.append(("validated", loss))

    def save(self, *args: Any, wait: bool) -> None:
        self.asked.append(("save", *args, wait))

    def close(self, *args: Any, save: bool) -> None:
        self.asked.append(("close", *args, save))

    def flush(self) -> Path | None:
        return self._path

    def newest(self) -> Any:
        return self._found

    best = newest


def run_state(checkpoints: Any = None, *, patience: int | None = None, ranks: Any = None) -> tuple[RunState, Any]:
    loop: Any = Loop()
    early = EarlyStopping(patience=patience)
    data: Any = None
    return RunState(data, loop, early, checkpoints=checkpoints, ranks=ranks), loop


class TestBestWeights:
    def test_none_were_noted(self) -> None:
        loop: Any = Loop()
        assert BestWeights(loop).put_back() is False
        assert loop.put == []

    def test_they_are_a_copy(self) -> None:
        loop: Any = Loop()
        best = BestWeights(loop)
        best.note()
        loop.weight.zero_()
        assert best.put_back() is True
        ((state),) = loop.put
        assert state["parameters"]["w"].tolist() == [1.0, 1.0, 1.0]
        assert state["buffers"] == {}

    @pytest.mark.parametrize(("patience", "kept"), [(None, False), (2, True)])
    def test_in_memory_only_where_they_are_wanted(self, patience: int | None, kept: bool) -> None:
        state, loop = run_state(patience=patience)
        assert state.restore_best(1, 1) is False
        state.validated(1.0)
        loop.weight.zero_()
        state.validated(2.0)  # worse: the first ones stay
        assert state.restore_best(1, 1) is kept
        assert [put["parameters"]["w"].tolist() for put in loop.put] == [[1.0, 1.0, 1.0]] * kept

    @pytest.mark.parametrize("found", [None, SimpleNamespace(state={"a": 1})])
    def test_on_disk_they_are_looked_for_after_the_present_ones_are_saved(self, found: Any) -> None:
        checkpoints = Checkpoints(found=found)
        state, loop = run_state(checkpoints, patience=2)
        assert state.restore_best(9, 8) is (found is not None)
        assert checkpoints.asked == [("save", 9, 8, True)]
        assert loop.put == ([] if found is None else [{"a": 1}])


def test_checkpoints_hear_of_what_happens() -> None:
    checkpoints = Checkpoints()
    state, _ = run_state(checkpoints, patience=2)
    state.between(5, 4)
    state.validated(1.0)
    state.validated(1.5)  # no better
    state.close(7, 6, save=False)
    assert checkpoints.asked == [("between", 5, 4), ("validated", 1.0), ("close", 7, 6, False)]
    assert state._best is None
    nothing, _ = run_state()
    nothing.between(5, 4)
    nothing.close(7, 6, save=True)


class TestKept:
    class Raises:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not yet")

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"handle": object()}

    def test_a_state_that_cannot_be_read(self) -> None:
        state, _ = run_state()
        thing: Any = self.Raises()
        with pytest.raises(MisuseError, match="RuntimeError") as raised:
            state.check("ema", thing)
        assert isinstance(raised.value.__cause__, RuntimeError)

    def test_a_state_that_cannot_be_written_matters_with_checkpoints(self) -> None:
        thing: Any = self.Odd()
        run_state()[0].check("ema", thing)
        with pytest.raises(MisuseError, match="ema"):
            run_state(Checkpoints())[0].check("ema", thing)
        run_state(Checkpoints())[0].check("ema", torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))

    def test_a_loader_is_left_alone(self) -> None:
        class Loader(self.Raises):  # type: ignore[name-defined,misc]
            def __iter__(self) -> Any:
                return iter(())

        thing: Any = Loader()
        run_state(Checkpoints())[0].check("loader", thing)


class TestResume:
    found = SimpleNamespace(state={"a": 1}, step=12, path=Path("step-12"))

    def test_from_the_newest(self) -> None:
        state, loop = run_state(Checkpoints(found=self.found))
        state.resume(None)
        assert loop.put == [{"a": 1}]

    def test_without_one_nothing_happens(self) -> None:
        for checkpoints in (None, Checkpoints()):
            state, loop = run_state(checkpoints)
            state.resume(None)
            assert loop.put == []

    @pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
    def test_the_first_rank_reports_it(self, rank: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
        ranks = SimpleNamespace(rank=rank, size=2)
        state, _ = run_state(Checkpoints(found=self.found), ranks=ranks)
        with caplog.at_level(logging.INFO, "steadystep"):
            state.resume(None)
        assert len(caplog.records) == lines

    def test_a_path_comes_before_the_newest(self, tmp_path: Path) -> None:
        writer, _ = run_state()
        path = writer.save(tmp_path / "there", 5, 4)
        state, loop = run_state(Checkpoints(found=self.found))
        state.resume(path)
        (put,) = loop.put
        assert put["step"] == 4
        assert torch.equal(put["parameters"]["w"], torch.ones(3))


class TestSave:
    def test_into_a_folder_that_is_made(self, tmp_path: Path) -> None:
        state, _ = run_state()
        path = state.save(tmp_path / "a" / "b", 5, 4)
        assert path.is_relative_to(tmp_path / "a" / "b")
        found = read_any(path, SingleProcess())
        assert (found.step, found.updates) == (5, 4)
        assert state.save(tmp_path / "a" / "b", 6, 5).exists()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="file"):
            run_state()[0].save(tmp_path / "file" / "b", 5, 4)

    def test_a_state_that_is_not_finite_is_not_written(self, tmp_path: Path) -> None:
        state, loop = run_state()
        loop.weight[1] = math.nan
        with pytest.raises(CheckpointError, match="w"):
            state.save(tmp_path / "there", 5, 4)
        assert list((tmp_path / "there").iterdir()) == []

    def test_nor_where_another_rank_has_one(self, tmp_path: Path) -> None:
        ranks = SimpleNamespace(rank=0, size=2, all=lambda _: False)
        state, _ = run_state(ranks=ranks)
        with pytest.raises(CheckpointError, match="step 5"):
            state.save(tmp_path / "there", 5, 4)
        assert list((tmp_path / "there").iterdir()) == []

    def test_without_a_folder_it_is_that_of_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(MisuseError, match="run_dir"):
            run_state()[0].save(None, 5, 4)
        checkpoints = Checkpoints(path=tmp_path)
        assert run_state(checkpoints)[0].save(None, 5, 4) == tmp_path
        assert checkpoints.asked == [("save", 5, 4, True)]
        with pytest.raises(CheckpointError, match="nowhere"):
            run_state(Checkpoints(path=tmp_path / "nowhere"))[0].save(None, 5, 4)


@pytest.mark.parametrize("verdict", [None, "healthy"])
def test_only_a_run_that_is_long_enough_gets_a_verdict(verdict: str | None) -> None:
    run: Any = SimpleNamespace(
        run_history=SimpleNamespace(verdict=lambda: verdict), diagnose=lambda: ("first", "second")
    )
    assert Parts.verdict(run) == (None if verdict is None else "first")


@pytest.mark.parametrize(("story", "at", "told"), [((), 5, "run"), (("story",), 5, "story"), (("story",), 4, "run")])
def test_a_diagnosis_holds_an_examination_until_the_next_step(story: tuple[str, ...], at: int, told: str) -> None:
    history = SimpleNamespace(diagnose=lambda: ("run",))
    run: Any = SimpleNamespace(progress=SimpleNamespace(examined=(at, story), attempts=5), run_history=history)
    assert Parts.diagnose(run)[0] == told
