"""What the settings turn into, one component at a time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that no test pays for it
from torch import nn

from steadystep.clip import PercentileClip, TensorEMAClip, ZScoreClip
from steadystep.config import Config
from steadystep.engine import components, microbatch_group
from steadystep.errors import ConfigError, MisuseError
from steadystep.parallel import SingleProcess
from steadystep.signals.gradients import Gradients
from steadystep.snapshots.no_recovery import NoRecovery
from steadystep.snapshots.recovery import InMemory
from steadystep.snapshots.replay_buffer import ReplayBuffer
from steadystep.snapshots.tensor_state import TensorState

ALONE = SingleProcess()
CPU = torch.device("cpu")


def config(mode: str = "autopilot", **sections: dict[str, Any]) -> Config:
    return Config.load({"mode": mode, **sections})


def ranks(*, rank: int = 0, size: int = 2) -> Any:
    return SimpleNamespace(
        rank=rank, size=size, on_all=lambda act: act, mean=list, sharded=False, stages=None, all=bool
    )


def net(*extra: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), *extra)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class TestSettings:
    def test_checkpoints_need_a_folder(self, tmp_path: Path) -> None:
        wanted = config(monitoring={"save_checkpoints": True})
        components.check_settings(wanted, None, tmp_path)
        with pytest.raises(ConfigError, match="run_dir"):
            components.check_settings(wanted, None, None)
        components.check_settings(config(monitoring={"save_checkpoints": False}), None, None)

    def test_one_schedule_at_most(self) -> None:
        planned = config(training={"lr_scheduler": "cosine", "total_steps": 10})
        components.check_settings(planned, None, None)
        components.check_settings(config(), lambda _: 1.0, None)
        with pytest.raises(ConfigError, match="lr_scheduler"):
            components.check_settings(planned, lambda _: 1.0, None)


@pytest.mark.parametrize(
    ("training", "clips"),
    [
        ({}, False),
        ({"max_grad_norm": 2.0}, True),
        ({"max_grad_value": 2.0}, True),
        ({"clip_rule": "zscore"}, True),
        ({"clip_rule": "zscore", "gradient_clipping": False}, False),
        ({"gradient_clipping": True}, True),
    ],
)
def test_advice_knows_what_is_clipped_already(training: dict[str, Any], clips: bool) -> None:
    assert components.setup(config(training=training), None).clips is clips


def test_advice_knows_precision_and_warmup() -> None:
    made = components.setup(config(training={"mixed_precision": "bf16", "warmup_steps": 5}), None)
    assert (made.precision, made.warms_up) == ("bf16", True)
    assert components.setup(config(), None).warms_up is False


@pytest.mark.parametrize(
    ("mode", "bundles", "in_folder", "writes"),
    [
        ("autopilot", True, True, True),
        ("careful", True, True, True),
        ("observe", True, True, False),
        ("autopilot", False, True, False),
        ("autopilot", True, False, False),
    ],
)
def test_bundles_are_written_to_a_folder_by_a_guard_that_intervenes(
    mode: str, bundles: bool, in_folder: bool, writes: bool, tmp_path: Path
) -> None:
    settings = config(mode, recovery={"incident_bundles": bundles})
    folder = tmp_path if in_folder else None
    assert components.setup(settings, folder).writes_bundles is writes
    assert (components.incidents(settings, folder) is not None) is writes


def test_the_budget_is_that_of_the_settings() -> None:
    made = components.budget(
        config(recovery={"max_skips_in_a_row": 7, "max_skips": 30}, training={"max_recovery_attempts": 5})
    )
    assert (made.max_skips_in_a_row, made.max_skips, made.max_rollbacks) == (7, 30, 5)


class TestLock:
    def test_the_first_rank_takes_it_in_a_folder(self, tmp_path: Path) -> None:
        held, wrong = components.lock(tmp_path, ALONE, force=False)
        assert held is not None
        assert wrong == ""
        assert (tmp_path / ".lock").exists()
        held.release()
        assert not (tmp_path / ".lock").exists()

    def test_nobody_else_does(self, tmp_path: Path) -> None:
        assert components.lock(None, ALONE, force=False) == (None, "")
        assert components.lock(tmp_path, ranks(rank=1), force=False) == (None, "")
        assert not (tmp_path / ".lock").exists()

    def test_a_refusal_is_raised_alone_and_passed_on_among_ranks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(folder: Path, *, force: bool) -> None:
            raise MisuseError(f"{folder.name}, {force}")

        monkeypatch.setattr(components, "RunLock", refuse)
        with pytest.raises(MisuseError, match="True"):
            components.lock(tmp_path, ALONE, force=True)
        assert components.lock(tmp_path, ranks(), force=False) == (None, f"{tmp_path.name}, False")


class TestSinks:
    def test_those_of_the_user_come_last(self) -> None:
        own: Any = object()
        assert components.sinks(config(monitoring={"sinks": []}), None, [own]) == (own,)
        *usual, last = components.sinks(config(), None, [own])
        assert last is own
        assert all(sink is not own for sink in usual)

    def test_the_log_counts_what_is_trained(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shown, logs = [], []
        log = SimpleNamespace(close=lambda: None)
        monkeypatch.setattr(components, "RunLog", lambda *given, **more: logs.append((given, more)) or log)
        monkeypatch.setattr(components, "Broadcast", lambda *given, **more: shown.append((given, more)))
        model, _ = net(nn.Linear(4, 2))
        model[1].requires_grad_(False)
        sink: Any = object()
        settings = config(monitoring={"sink_frequency": 7, "log_frequency": 9})
        for folder, name in ((tmp_path / "mine", "mine"), (None, "run")):
            components.tracking(settings, folder, model, [sink], {"lr": 0.1}).close()
            (sinks, run), more = shown.pop()
            assert sinks == [sink]
            assert (run.name, run.run_dir, run.parameters) == (name, folder, 3 * 4 + 4)
            assert (run.settings["mode"], run.hparams) == ("autopilot", {"lr": 0.1})
            assert more == {"every": 7, "layers_every": 9}
        (((folder,), more),) = logs
        assert folder == tmp_path / "mine"
        assert more["parameters"] == {"0.weight": 12, "0.bias": 4}
        assert (more["layers_every"], more["settings"]["mode"], more["hparams"]) == (9, "autopilot", {"lr": 0.1})
        components.tracking(settings, None, model, [], {}).close()
        assert not shown


class TestCheckpointing:
    def test_without_a_folder_or_a_wish_there_is_none(self, tmp_path: Path) -> None:
        loop: Any = None
        assert components.checkpointing(config(monitoring={"save_checkpoints": True}), None, loop, ALONE) is None
        for wish in (None, False):
            wanted = config(monitoring={"save_checkpoints": wish})
            assert components.checkpointing(wanted, tmp_path, loop, ALONE) is None

    @pytest.mark.parametrize(("given", "every"), [(70, (70, None)), ("30min", (None, 1800.0))])
    def test_by_steps_or_by_the_clock(
        self, given: Any, every: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(components, "Checkpointing", lambda *args, **more: asked.append((args, more)) or "made")
        wanted = config(monitoring={"save_checkpoints": True, "checkpoint_frequency": given, "keep_checkpoints": 5})
        loop: Any = object()
        assert components.checkpointing(wanted, tmp_path, loop, ALONE) == "made"
        (((folder, its_loop, cadence), more),) = asked
        assert folder == tmp_path / "checkpoints"
        assert its_loop is loop
        assert (cadence.steps, cadence.seconds) == every
        assert more == {"keep_last": 5, "ranks": ALONE}


class TestLimits:
    @pytest.mark.parametrize(("mult", "again"), [(0.7, 0.5), (0.5, 0.5), (0.3, 0.3), (1.0, 1.0)])
    def test_a_second_cut_is_by_half_at_least_and_none_stays_none(self, mult: float, again: float) -> None:
        made = components.limits(config(recovery={"lr_mult": mult}))
        assert (made.lr_mult, made.lr_mult_again) == (mult, again)

    @pytest.mark.parametrize(
        ("recovers", "snapshots", "rolls_back"), [(True, 4, True), (True, 1, True), (True, 0, False), (False, 4, False)]
    )
    def test_a_rollback_needs_snapshots_and_leave(self, recovers: bool, snapshots: int, rolls_back: bool) -> None:
        settings = config(training={"auto_recovery": recovers}, recovery={"snapshots": snapshots})
        made = components.limits(settings)
        assert made.rolls_back is rolls_back
        assert made.replays is rolls_back

    def test_the_rest_is_passed_on(self) -> None:
        made = components.limits(config(recovery={"trust_steps": 9, "rewarm_steps": 8, "skip_batches": False}))
        assert (made.trust_steps, made.rewarm_steps, made.skips_batches, made.replays) == (9, 8, False, False)
        assert components.limits(config()).skips_batches

    @pytest.mark.parametrize(
        ("mode", "training", "recovery", "megabytes"),
        [
            ("autopilot", {}, {}, 100.0),
            ("careful", {}, {}, 0.0),
            ("observe", {}, {}, 0.0),
            ("autopilot", {"auto_recovery": False}, {}, 0.0),
            ("autopilot", {}, {"snapshots": 0}, 0.0),
            ("autopilot", {}, {"snapshots": 1}, 100.0),
            ("autopilot", {}, {"skip_batches": False}, 0.0),
        ],
    )
    def test_batches_are_remembered_where_updates_can_be_replayed(
        self, mode: str, training: dict[str, Any], recovery: dict[str, Any], megabytes: float
    ) -> None:
        settings = config(mode, training=training, recovery={"replay_memory_mb": 100} | recovery)
        assert components.replay_buffer_bytes(settings) == megabytes * 1e6


class TestRecovery:
    def made(self, settings: Config, folder: Path | None = None, at: Any = ALONE) -> Any:
        model, optimizer = net()
        tensors = TensorState(model, optimizer, Gradients(model, optimizer))
        return components.recovery(settings, tensors, {}, CPU, at, ReplayBuffer(max_bytes=0), folder)

    @pytest.mark.parametrize(
        ("settings", "keeps"),
        [
            (config(), True),
            (config("careful"), False),
            (config("observe"), False),
            (config(training={"auto_recovery": False}), False),
            (config(recovery={"snapshots": 0}), False),
        ],
    )
    def test_snapshots_are_taken_where_a_rollback_may_be_made(self, settings: Config, keeps: bool) -> None:
        assert isinstance(self.made(settings), InMemory if keeps else NoRecovery)

    def test_snapshots_have_the_limits_of_the_settings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[str, Any]] = []
        real = components.Snapshots

        def spy(*args: Any, **more: Any) -> Any:
            asked.append(more)
            return real(*args, **more)

        monkeypatch.setattr(components, "Snapshots", spy)
        recovery = {"snapshots": 3, "trust_steps": 11, "snapshot_memory_gb": 0.5, "snapshot_disk_gb": 0.25}
        for folder, saves in ((None, None), (tmp_path, True), (tmp_path, False)):
            self.made(config(recovery=recovery, monitoring={"save_checkpoints": saves}), folder)
        for more in asked:
            assert (more["count"], more["min_interval"], more["device"]) == (3, 11, CPU)
            assert more["memory_bytes"] == 2**29
        assert [more["folder"] for more in asked] == [None, tmp_path / "snapshots", tmp_path / "snapshots"]
        assert [more["checkpoints"] for more in asked] == [False, True, False]


class TestMeasuring:
    @pytest.mark.parametrize(
        ("mode", "splits", "size", "kept", "used"),
        [
            ("autopilot", True, 1, True, True),
            ("careful", True, 1, True, True),
            ("observe", True, 1, False, False),
            ("autopilot", False, 1, False, False),
            ("autopilot", True, 2, True, False),
        ],
    )
    def test_batches_are_split_where_the_guard_may_intervene(
        self, mode: str, splits: bool, size: int, kept: bool, used: bool
    ) -> None:
        model, optimizer = net()
        at = ranks(size=size)
        at.watch, at.norms = lambda *_, **__: None, lambda names, norms: norms
        at.stand_in, at.any_rank = None if size == 1 else object(), lambda wanted: wanted
        settings = config(mode, training={"split_when_out_of_memory": splits})
        made = components.measuring_for(settings, model, optimizer, at, repeats=True)
        assert (made.measurer.over_ranks is None) is (size == 1)
        assert (made.memory is not None) is kept
        assert (made.runner._memory is not None) is used
        assert (made.runner._shortage is not None) is (kept and not used)  # several ranks agree first
        if made.memory is not None:
            assert made.memory.size is None

    @pytest.mark.parametrize(("extra", "least"), [(nn.BatchNorm1d(4), 2), (nn.LayerNorm(4), 1)])
    def test_batch_norm_needs_two_rows_in_each_part(self, extra: nn.Module, least: int) -> None:
        model, _ = net(extra)
        made = components._memory(config(training={"split_when_out_of_memory": True}), model)
        assert made is not None
        assert made._least == least

    def test_the_group_has_the_size_of_the_settings_and_random_numbers_count_where_passes_repeat(self) -> None:
        model, optimizer = net()
        settings = config(training={"gradient_accumulation_steps": 3})
        for repeats in (True, False):
            made = components.measuring_for(settings, model, optimizer, ALONE, repeats=repeats)
            assert made.runner.group.size == 3
            assert (made.runner._draws is not None) is repeats
            assert made.device == CPU


class Attends(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Linear(2, 2), False),
        (nn.Dropout(0.1), True),
        (nn.Dropout2d(0.1), True),
        (Attends(0.1), True),
        (Attends(0.0), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
    ],
)
def test_dropout_draws_also_inside_other_layers(module: nn.Module, draws: bool) -> None:
    assert bool(microbatch_group.draws(module)) is draws


class TestClipping:
    @pytest.mark.parametrize(
        ("rule", "kind"),
        [
            ("zscore", ZScoreClip),
            ("percentile", PercentileClip),
            ("tensor-ema", TensorEMAClip),
            ("agc", None),
            (None, None),
        ],
    )
    def test_the_rule_that_is_named(self, rule: str | None, kind: Any) -> None:
        made = components.clip_rule(config(training={"clip_rule": rule}))
        assert type(made) is kind if kind else made is None
        if rule is not None:
            assert components.clip_rule(config(training={"clip_rule": rule, "gradient_clipping": False})) is None

    @pytest.mark.parametrize(
        ("rule", "clipping", "kind"),
        [
            ("tensor-ema", None, "ByTensors"),
            ("agc", None, "ByUnits"),
            ("agc", True, "ByUnits"),
            ("agc", False, None),
            ("tensor-ema", False, None),
            ("zscore", None, None),
            (None, None, None),
        ],
    )
    def test_tensors_or_units_one_by_one(self, rule: str | None, clipping: bool | None, kind: str | None) -> None:
        model, optimizer = net()
        settings = config(training={"clip_rule": rule, "gradient_clipping": clipping})
        made = components.tensor_clip(
            settings, components.clip_rule(settings), Gradients(model, optimizer), sharded=False
        )
        assert (None if made is None else type(made).__name__) == kind

    def test_units_that_are_sharded_are_refused(self) -> None:
        model, optimizer = net()
        gradients = Gradients(model, optimizer)
        with pytest.raises(ConfigError, match="agc"):
            components.tensor_clip(config(training={"clip_rule": "agc"}), None, gradients, sharded=True)
        off = config(training={"clip_rule": "agc", "gradient_clipping": False})
        assert components.tensor_clip(off, None, gradients, sharded=True) is None
        assert components.tensor_clip(config(), None, gradients, sharded=True) is None
