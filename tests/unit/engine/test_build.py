"""Which parts a guard is made of, and that closing it lets go of them."""

import functools
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that no test pays for it
from torch import nn

import steadystep
from steadystep.checkpoints.data_position import _never
from steadystep.engine import build as building
from steadystep.engine import ownership
from steadystep.errors import ConfigError, MisuseError
from steadystep.precision import Precision
from steadystep.snapshots.buffers import Buffers
from tests.loops import batches, squared


def guarded(run_dir: Path | None = None, model: nn.Module | None = None, **config: Any) -> steadystep.Guard:
    model = nn.Linear(6, 1) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return steadystep.Guard(model, optimizer, run_dir=run_dir, config=config or None)


def names(guard: steadystep.Guard) -> set[str]:
    return {name for name in guard._parts.stateful if not name.startswith("detector")}


class TestParts:
    def test_what_is_saved(self) -> None:
        always = {
            "precision",
            "accumulation",
            "replay buffer",
            "budget",
            "run history",
            "early stopping",
            "learning_rate",
            "probes",
            "inputs",
            "rollback trial",
            "sudden zero",
        }
        assert names(guarded(training={"split_when_out_of_memory": False})) == always
        assert names(guarded(training={"split_when_out_of_memory": True})) == always | {"memory"}
        clipped = names(guarded(training={"clip_rule": "zscore", "split_when_out_of_memory": False}))
        assert clipped == always | {"clip rule"}

    def test_the_measurer_reads_the_learning_rate_of_the_guard(self) -> None:
        parts = guarded()._parts
        assert parts.measurer.learning_rate is parts.learning_rate

    def test_what_is_rolled_back(self) -> None:
        def rolled_back(**config: Any) -> set[str]:
            return {name for name in guarded(**config)._parts.recovery._parts if not name.startswith("detector")}

        assert rolled_back() == {"precision", "accumulation"}
        assert rolled_back(recovery={"skip_batches": False}) == {"precision", "accumulation", "data"}
        assert rolled_back(training={"lr_scheduler": "plateau"}) == {"precision", "accumulation", "plateau"}

    def test_early_stopping_is_wanted_by_the_settings(self) -> None:
        for training, wanted in (({"early_stopping": True, "patience": 3}, True), ({}, False)):
            assert guarded(training=training)._parts.run_state.early_stopping.wanted is wanted

    def test_a_single_process_shards_nothing_and_reruns_with_its_own_parts(self) -> None:
        parts = guarded()._parts
        assert parts.updater._sharded is None
        reruns = parts.counterfactuals.reruns
        assert isinstance(reruns.precision, Precision)
        assert isinstance(reruns.buffers, Buffers)

    def test_the_updater_clips_as_the_settings_say(self) -> None:
        parts = guarded(training={"max_grad_norm": 2.0, "max_grad_value": 3.0})._parts
        assert (parts.updater._clip_norm, parts.updater._clip_value) == (2.0, 3.0)

    def test_gradients_are_sampled_for_sinks_that_want_them(self) -> None:
        assert guarded(monitoring={"sinks": []})._parts.gradient_samples.due(100) is False

    def test_an_error_leaves_the_model_as_it_was(self) -> None:
        model = nn.Linear(6, 1)
        with pytest.raises(ConfigError):
            guarded(model=model, training={"fp32_modules": ["nothing*"]})
        with pytest.raises(ConfigError):  # after the islands were made
            guarded(
                model=nn.Sequential(model),
                training={"mixed_precision": "bf16", "fp32_modules": ["0"], "lr_scheduler": "cosine", "min_lr": 9.0},
            )
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert guarded(model=model).step(lambda: squared(model, batches(1)[0])).stepped


class TestSeveralRanks:
    """The end of the data is agreed on among ranks."""

    def made(self, size: int, accumulate: int) -> Any:
        guard = guarded(training={"gradient_accumulation_steps": accumulate})
        measuring = SimpleNamespace(device=torch.device("cpu"), finite=None)
        asked: list[Any] = []

        def any_rank(wanted: Any) -> Any:
            asked.append(wanted)
            return wanted

        ranks = SimpleNamespace(rank=0, size=size, sharded=False, stages=None, agreements=1, any_rank=any_rank)
        ranks.on_all = lambda act, when: any_rank(when)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        none: Any = None
        given: Any = (guard, guard.config, model, optimizer, None, ranks, measuring, none, ())
        return building._Ground(*given)._run_state().data, asked

    @pytest.mark.parametrize(("size", "accumulate", "agreed"), [(1, 1, 0), (2, 1, 1), (2, 2, 1), (1, 4, 0)])
    def test_it_is_agreed_on(self, size: int, accumulate: int, agreed: int) -> None:
        data, asked = self.made(size, accumulate)
        assert len(asked) == agreed
        assert (data.ends is _never) is (agreed == 0)
        if agreed:
            seen = []
            for batch in data.batches([1, 2, 3], lambda: None):
                seen.append((batch, asked[0]()))
            assert seen == [(1, False), (2, accumulate == 2), (3, True)]


class TestClose:
    def test_the_folder_is_free_again(self, tmp_path: Path) -> None:
        guard = guarded(tmp_path)
        assert (tmp_path / ".lock").exists()
        held = guard._parts.lock
        guard.close()
        assert held is not None
        assert not (tmp_path / ".lock").exists()

    def test_snapshots_and_hooks_are_dropped(self) -> None:
        model = nn.Linear(6, 1)
        guard = guarded(model=model)
        for x in batches(3):
            guard.step(lambda x: squared(model, x), batch=x)
        assert guard._parts.recovery.states
        guard.close()
        assert not guard._parts.recovery.states
        assert not model._forward_hooks

    def test_what_was_loaded_replaces_an_open_group_and_all_snapshots(self) -> None:
        model = nn.Linear(6, 1)
        guard = guarded(model=model, training={"gradient_accumulation_steps": 2})
        saved = guard.state_dict()
        for x in batches(5):
            guard.step(lambda x: squared(model, x), batch=x)
        assert (guard.attempts, guard.updates, len(guard._parts.runner.group.members)) == (2, 2, 1)
        assert guard._parts.recovery.states
        guard.load_state_dict(saved)
        assert (guard.attempts, guard.updates, len(guard._parts.runner.group.members)) == (0, 0, 0)
        assert not guard._parts.recovery.states


class TestOwnership:
    def test_without_an_optimizer_the_model_is_looked_at_first(self) -> None:
        wrong: Any = 3
        with pytest.raises(MisuseError, match="Module"):
            steadystep.Guard(wrong, None)
        with pytest.raises(MisuseError, match="Module"):
            steadystep.Guard(wrong, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))

    def test_one_guard_for_one_optimizer(self) -> None:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = steadystep.Guard(model, optimizer)
        with pytest.raises(MisuseError, match="close"):
            steadystep.Guard(model, optimizer)
        first.close()
        second = steadystep.Guard(model, optimizer)
        reference = weakref.ref(second)
        del first, second
        gc.collect()
        assert reference() is None
        steadystep.Guard(model, optimizer)

    def test_after_an_error_nothing_is_claimed(self) -> None:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError):
            steadystep.Guard(model, optimizer, config={"training": {"fp32_modules": ["nothing*"]}})
        assert not ownership._held(optimizer)
        steadystep.Guard(model, optimizer)

    def test_what_is_no_optimizer_is_refused(self) -> None:
        wrong: Any = object()
        with pytest.raises(MisuseError):
            ownership.claim(self, nn.Linear(1, 1), wrong)

    def test_all_that_are_alive_are_concluded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        concluded = []

        class Holder:
            def _conclude(self) -> None:
                concluded.append(self)

        class Other:
            pass

        holder, other = Holder(), Other()
        optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(4)]
        held = dict(zip(optimizers, (holder, holder, other, Other()), strict=True))
        monkeypatch.setattr(ownership, "_HOLDERS", {key: weakref.ref(value) for key, value in held.items()})
        del held
        gc.collect()
        ownership.conclude_all()
        assert concluded == [holder]


class TestHooks:
    """A hook that holds an optimizer and calls `step` is found by what it holds."""

    def test_it_is_found_among_the_first_four(self) -> None:
        own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        for place, found in ((0, True), (3, True), (4, False)):
            things: list[Any] = [None] * 6
            things[place] = own
            assert ownership._is_optimizer(things) is found
            assert ownership._is_optimizer(tuple(things)) is found
            assert ownership._is_optimizer(dict(enumerate(things))) is found
        assert ownership._is_optimizer(own)
        assert not ownership._is_optimizer("optimizer")

    def test_in_a_method_a_partial_a_default_or_a_cell(self) -> None:
        own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

        class Owner:
            def __init__(self) -> None:
                self.optimizer = own

            def hook(self, _: Any) -> None:
                self.optimizer.step()

            def quiet(self, _: Any) -> None:
                self.optimizer.zero_grad()

        def plain(optimizer: Any, _: Any) -> None:
            optimizer.step()

        def by_default(_: Any, optimizer: Any = own) -> None:
            optimizer.step()

        def nothing(_: Any, thing: Any = None) -> None:
            thing.step()

        steps = ownership._steps
        assert steps(Owner().hook)
        assert steps(functools.partial(plain, own))
        assert steps(functools.partial(plain, optimizer=own))
        assert steps(functools.partial(by_default))
        assert steps(by_default)
        assert steps(lambda _: own.step())
        assert not steps(Owner().quiet)
        assert not steps(nothing)
        assert not steps(functools.partial(nothing))
        assert not steps(print)


def test_who_calls_the_closure_itself() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    assert ownership.reevaluates(torch.optim.LBFGS(parameters))
    assert not ownership.reevaluates(torch.optim.SGD(parameters, lr=0.1))
    assert ownership.steps_elsewhere(torch.optim.LBFGS(parameters))
    assert not ownership.steps_elsewhere(torch.optim.SGD(parameters, lr=0.1))
    for optimizer, closed, kind in (
        (torch.optim.SGD(parameters, lr=0.1), True, MisuseError),
        (torch.optim.SGD(parameters, lr=0.1), False, MisuseError),
        (torch.optim.LBFGS(parameters), False, steadystep.UnsupportedError),
        (torch.optim.LBFGS(parameters), True, MisuseError),
    ):
        with pytest.raises(kind):
            ownership.refuse_step(optimizer, closed=closed)
