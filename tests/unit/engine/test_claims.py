"""One guard per optimizer: who holds it, who replaces whom, and optimizers that step by themselves."""

import functools
import logging
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from steadystep.config import Config
from steadystep.engine import ownership
from steadystep.engine.closures import ByHand
from steadystep.engine.microbatch_group import check_pipelined, draws, refuse_loss
from steadystep.engine.ownership import (
    assemble,
    claim,
    conclude_all,
    inside_backward,
    is_interactive,
    no_loss_seen,
    others_guard,
    refuse_foreign_steps,
    refuse_step,
    release,
    replace_earlier,
    settings_to_resume,
    steps_elsewhere,
    steps_in_backward,
)
from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.optimizers import CombinedOptimizer
from steadystep.parallel.stages import PIPELINES


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_HOLDERS", weakref.WeakKeyDictionary())
    monkeypatch.setattr(ownership, "WATCHERS", weakref.WeakKeyDictionary())


def sgd(*parameters: nn.Parameter) -> SGD:
    return SGD(parameters or [nn.Parameter(torch.ones(1))], lr=0.1)


class Holder:
    """Stands for a guard, with the log of its run."""

    def __init__(self, folder: Path | None = None) -> None:
        path = None if folder is None else folder / "log.jsonl"
        self._parts = SimpleNamespace(log=SimpleNamespace(log=SimpleNamespace(path=path)))
        self.closed = self.concluded = 0

    def close(self) -> None:
        self.closed += 1

    def _conclude(self) -> None:
        self.concluded += 1


MODEL = nn.Linear(1, 1)


class TestClaims:
    def test_one_at_a_time(self) -> None:
        optimizer, first = sgd(), Holder()
        claim(first, MODEL, optimizer)
        with pytest.raises(MisuseError, match="already has a guard"):
            claim(Holder(), MODEL, optimizer)
        release(optimizer)
        claim(Holder(), MODEL, optimizer)
        with pytest.raises(MisuseError, match="got int"):
            claim(first, MODEL, 3)  # type: ignore[arg-type]

    def test_one_that_was_dropped_in_a_circle_is_none(self) -> None:
        optimizer, first = sgd(), Holder()
        first.me = first  # type: ignore[attr-defined]
        claim(first, MODEL, optimizer)
        del first
        claim(Holder(), MODEL, optimizer)

    def test_all_optimizers_of_a_guard_are_claimed(self) -> None:
        one, other, holder = sgd(), sgd(), Holder()
        claim(holder, MODEL, CombinedOptimizer([one, other]))
        for each in (one, other):
            with pytest.raises(MisuseError):
                claim(holder, MODEL, each)

    def test_another_one_holds_the_same_weights(self) -> None:
        shared, own = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        mine, theirs, apart, holder = sgd(own, shared), sgd(shared), sgd(nn.Parameter(torch.ones(1))), Holder()
        assert not others_guard([mine])
        claim(holder, MODEL, theirs)
        claim(holder, MODEL, apart)
        assert others_guard([mine])
        assert others_guard([sgd(), mine])
        assert not others_guard([theirs])  # it is that one's own
        assert not others_guard([sgd()])
        assert not others_guard([mine, theirs])
        del holder
        assert not others_guard([mine])

    def test_at_the_end_each_is_concluded_once(self) -> None:
        first, second, silent = Holder(), Holder(), Steps(None)
        optimizers = [sgd() for _ in range(4)]
        for holder, optimizer in zip((first, first, second, silent), optimizers, strict=True):
            claim(holder, MODEL, optimizer)
        claim(Holder(), MODEL, sgd())  # gone
        conclude_all()
        assert (first.concluded, second.concluded) == (1, 1)

    def test_after_an_error_nothing_is_claimed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: dict[str, Any] = {}

        def build(*_: Any, **options: Any) -> Any:
            given.update(options)
            raise KeyboardInterrupt

        monkeypatch.setattr(ownership, "build", build)
        optimizer = sgd()
        settings: dict[str, Any] = {"detectors": (), "sinks": (), "force": True, "hparams": {"a": 1}}
        with pytest.raises(KeyboardInterrupt):
            assemble(Holder(), MODEL, optimizer, None, None, None, **settings)  # type: ignore[arg-type]
        assert (given["force"], given["hparams"]) == (True, {"a": 1})
        claim(Holder(), MODEL, optimizer)
        monkeypatch.setattr(ownership, "build", lambda *_, **__: "parts")
        _, made, parts = assemble(Holder(), MODEL, None, None, None, None, **settings)  # type: ignore[arg-type]
        assert isinstance(made, ByHand)
        assert parts == "parts"  # type: ignore[comparison-overlap]

    def test_a_run_that_goes_on_saves(self) -> None:
        assert not Config.load(None).monitoring.save_checkpoints
        assert settings_to_resume(MODEL, None).monitoring.save_checkpoints


class TestCells:
    @pytest.fixture(autouse=True)
    def _cells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ownership, "is_interactive", lambda: True)

    def test_in_a_program_nothing_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ownership, "is_interactive", lambda: False)
        optimizer, old = sgd(), Holder()
        claim(old, MODEL, optimizer)
        replace_earlier(optimizer, None)
        assert old.closed == 0

    @pytest.mark.parametrize("run_dir", [None, "a"])
    def test_the_one_of_the_same_optimizer(self, tmp_path: Path, caplog: Any, run_dir: str | None) -> None:
        optimizer, old, other = sgd(), Holder(), Holder(tmp_path / "b")
        elsewhere = sgd()
        claim(old, MODEL, optimizer)
        claim(other, MODEL, elsewhere)
        with caplog.at_level(logging.WARNING, "steadystep"):
            replace_earlier(optimizer, None if run_dir is None else tmp_path / run_dir)
        assert (old.closed, other.closed) == (1, 0)
        assert "earlier guard of this optimizer" in caplog.text

    def test_the_one_of_the_same_folder(self, tmp_path: Path, caplog: Any) -> None:
        old, other, without = Holder(tmp_path / "a"), Holder(tmp_path / "b"), Holder()
        optimizers = sgd(), sgd(), sgd()
        for holder, optimizer in zip((old, other, without), optimizers, strict=True):
            claim(holder, MODEL, optimizer)
        with caplog.at_level(logging.WARNING, "steadystep"):
            replace_earlier(sgd(), tmp_path / "x" / ".." / "a")
        assert (old.closed, other.closed, without.closed) == (1, 0, 0)
        assert "earlier guard of this run_dir" in caplog.text

    def test_the_one_of_both_is_closed_once_and_one_that_is_gone_not_at_all(self, tmp_path: Path) -> None:
        optimizer, old = sgd(), Holder(tmp_path)
        claim(old, MODEL, optimizer)
        replace_earlier(optimizer, tmp_path)
        assert old.closed == 1
        del old
        replace_earlier(optimizer, tmp_path)

    @pytest.mark.parametrize("alive", [True, False])
    def test_a_watcher_is_removed(self, alive: bool) -> None:
        optimizer, old = sgd(), Holder()
        removed: list[int] = []

        class Watcher:
            def remove(self) -> None:
                removed.append(1)

        watcher = Watcher()
        claim(old, MODEL, optimizer)
        ownership.WATCHERS[old] = weakref.ref(watcher)
        if not alive:
            del watcher
        replace_earlier(optimizer, None)
        assert (len(removed), old.closed) == ((1, 0) if alive else (0, 1))


def test_a_prompt_or_a_notebook_is_interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "ps1", raising=False)
    for module, found in (
        (None, False),
        (SimpleNamespace(get_ipython=lambda: None), False),
        (SimpleNamespace(get_ipython=object), True),
        (SimpleNamespace(), False),
    ):
        monkeypatch.setitem(sys.modules, "IPython", module)
        assert is_interactive() is found
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert is_interactive()


OWN = sgd()
ALL = [sgd()]


def of_a_global(_: Tensor) -> None:
    OWN.step()


def of_a_list(_: Tensor) -> None:
    ALL[0].step()


def of_nothing(_: Tensor) -> None:
    OWN.zero_grad()


def of_whatever(optimizer: Any, _: Any = None) -> None:
    optimizer.state.clear()


class Steps:
    def __init__(self, held: Any) -> None:
        self.held = held

    def step(self, _: Any = None) -> None:
        self.step()

    def log(self, _: Any = None) -> None:
        self.held.clear()


def hooked(*hooks: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(1))
    for hook in hooks:
        parameter.register_post_accumulate_grad_hook(hook)
    return parameter


class TestStepsInBackward:
    def test_hooks_that_hold_an_optimizer_and_step(self) -> None:
        inner = sgd()

        def of_a_cell(_: Tensor, more: int = 1) -> None:
            inner.step()

        for hook in (
            of_a_global,
            of_a_list,
            of_a_cell,
            functools.partial(of_whatever, OWN),
            functools.partial(of_whatever, optimizer=OWN),
            functools.partial(functools.partial(of_a_global)),
            Steps(OWN).step,
            Steps([OWN]).step,
            Steps({1: OWN}).step,
            Steps((1, 2, 3, OWN)).step,
            Steps({1: 1, 2: 2, 3: 3, 4: OWN}).step,
        ):
            assert steps_in_backward(hooked(hook)), hook
            assert steps_in_backward(hooked(of_nothing, hook)), hook
            assert steps_in_backward(hooked(hook, of_nothing)), hook

    def test_hooks_that_do_not(self) -> None:
        for hook in (
            of_nothing,
            functools.partial(of_whatever, 3),
            functools.partial(print, end=""),
            print,
            Steps(OWN).log,
            Steps(3).step,
            Steps([1, 2, 3, 4, OWN]).step,  # nobody looks through all of a long list
            Steps({1: 1, 2: 2, 3: 3, 4: 4, 5: OWN}).step,
        ):
            assert not steps_in_backward(hooked(hook)), hook
        assert not steps_in_backward(hooked())

    def test_a_name_that_is_not_bound_yet(self) -> None:
        def hook(_: Tensor) -> None:
            made.step()

        assert not steps_in_backward(hooked(hook))
        made = sgd()
        assert steps_in_backward(hooked(hook))

    def test_one_of_torch_and_a_default(self) -> None:
        parameter = hooked()
        parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
        assert not steps_in_backward(parameter)
        parameter._in_backward_optimizers = [OWN]  # type: ignore[attr-defined]
        assert steps_in_backward(parameter)

        def by_default(_: Tensor, own: Any = OWN) -> None:
            own.step()

        assert steps_in_backward(hooked(by_default))

    def test_inside_of_backward_one_is(self) -> None:
        seen: list[bool] = []
        parameter = hooked(lambda _: seen.append(inside_backward()))
        parameter.sum().backward()
        assert seen == [True]
        assert not inside_backward()


class TestRefusals:
    def test_what_to_call_instead(self) -> None:
        for optimizer, closed, kind, says in (
            (OWN, True, MisuseError, "is closed"),
            (OWN, False, MisuseError, "watches a loop"),
            (LBFGS(MODEL.parameters()), False, UnsupportedError, "LBFGS calls the closure itself"),
            (ByHand(MODEL), False, MisuseError, "has no optimizer to step"),
        ):
            with pytest.raises(kind, match=says):
                refuse_step(optimizer, closed=closed)

    def test_who_steps_elsewhere(self) -> None:
        found = [steps_elsewhere(each) for each in (OWN, LBFGS(MODEL.parameters()), ByHand(MODEL))]
        assert found == [False, True, True]

    def test_a_pipeline_is_named_where_there_may_be_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, PIPELINES, raising=False)
        assert "pipeline" not in no_loss_seen()
        monkeypatch.setitem(sys.modules, PIPELINES, SimpleNamespace())
        assert no_loss_seen().endswith("create its PipelineStage before the guard")

    def test_flat_shards_are_refused_anywhere_in_a_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Flat(nn.Module):
            pass

        monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FullyShardedDataParallel=Flat))
        refuse_foreign_steps(nn.Sequential(nn.Tanh()), OWN)
        with pytest.raises(UnsupportedError, match="FSDP1"):
            refuse_foreign_steps(nn.Sequential(nn.Tanh(), Flat()), OWN)
        monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
        refuse_foreign_steps(nn.Sequential(Flat()), [OWN, OWN])

    def test_one_parameter_that_steps_is_enough_and_what_is_no_model_is_refused_elsewhere(self) -> None:
        model = nn.Linear(1, 1)
        model.bias.register_post_accumulate_grad_hook(of_a_global)
        with pytest.raises(UnsupportedError, match="inside backward"):
            refuse_foreign_steps(model, OWN)
        refuse_foreign_steps(3, OWN)
        foreign = type("Engine", (), {"__module__": "deepspeed.runtime"})()
        for model, optimizer in ((foreign, OWN), (3, [OWN, foreign]), (3, foreign)):
            with pytest.raises(UnsupportedError, match="DeepSpeed"):
                refuse_foreign_steps(model, optimizer)


def test_a_pipeline_leaves_no_place_for_some_settings() -> None:
    stages: Any = SimpleNamespace()

    def refused(**settings: Any) -> str:
        config = Config.load(settings)
        check_pipelined(config, None)
        try:
            check_pipelined(config, stages)
        except ConfigError as error:
            return str(error).partition("remove ")[2]
        return ""

    assert refused() == refused(training={"gradient_accumulation_steps": 1, "mixed_precision": "bf16"}) == ""
    assert refused(training={"gradient_accumulation_steps": 2}) == "training.gradient_accumulation_steps"
    assert refused(training={"mixed_precision": "fp16"}) == "training.mixed_precision: fp16"
    assert refused(monitoring={"recompute_every": 10}) == "monitoring.recompute_every"
    for rule, norm, fits in (
        ("agc", None, True),
        ("agc", 1.0, False),
        ("tensor-ema", 1.0, False),
        ("zscore", 1.0, True),
    ):
        assert (refused(training={"clip_rule": rule, "max_grad_norm": norm}) == "") is fits, (rule, norm)


def test_a_pipeline_takes_a_function_without_a_weight() -> None:
    refuse_loss(print, None)
    for work, weight in ((print, 0.5), (print, 0.0), (torch.ones(()), None), (torch.ones(()), 0.5)):
        with pytest.raises(MisuseError, match="pipeline"):
            refuse_loss(work, weight)


def test_which_models_draw() -> None:
    class Own(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.dropout = dropout

    drawing = (nn.Dropout(0.1), nn.Sequential(nn.Tanh(), nn.Dropout2d(0.1)), Own(0.1), nn.LSTM(1, 1, 2, dropout=0.1))
    assert all(map(draws, drawing))
    assert not any(map(draws, (nn.Linear(1, 1), Own(0.0), nn.LSTM(1, 1))))
