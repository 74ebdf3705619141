"""The YAML: accepted as users write it, refused with a message they can act on, no key ignored."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steadystep
from steadystep.config import Config, MonitoringSettings, RecoverySettings, TrainingSettings

SECTIONS = {"training": TrainingSettings, "monitoring": MonitoringSettings, "recovery": RecoverySettings}


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return Config.load(path)


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
training:
  max_grad_norm: 1.0
  gradient_clipping: true
  gradient_accumulation_steps: 4
  learning_rate: 1e-5        # YAML reads this as text
  mixed_precision: bf16
  autocast: true
monitoring:
  log_frequency: 100
""",
    )
    assert config.training.learning_rate == 1e-5
    assert config.training.clip_norm == 1.0
    assert config.training.gradient_accumulation_steps == 4
    assert config.training.mixed_precision == "bf16"
    assert config.monitoring.log_frequency == 100


def test_a_mapping_a_config_a_path_and_nothing_are_all_configs(tmp_path: Path) -> None:
    mapping = {"training": {"max_grad_norm": 2}}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(mapping))
    assert Config.load(mapping) == Config.load(path) == Config.load(str(path)) == Config.load(Config.load(mapping))
    assert Config.load(None) == Config()
    assert load(tmp_path, "") == Config()
    assert load(tmp_path, "training:\n") == Config()
    with pytest.raises(steadystep.ConfigError, match="got list"):
        Config.load([1])


def test_presets() -> None:
    assert [preset().mode for preset in (steadystep.observe, steadystep.careful, steadystep.autopilot)] == [
        "observe",
        "careful",
        "autopilot",
    ]
    assert steadystep.autopilot() == Config()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"training": {"max_grad_nrom": 1}}, "did you mean 'training.max_grad_norm'?"),
        ({"trainning": {}}, "did you mean 'training'?"),
        ({"training": {"log_frequency": 1}}, "did you mean 'monitoring.log_frequency'?"),
        ({"max_grad_norm": 1}, "did you mean 'training.max_grad_norm'?"),
        ({"monitoring": {"zzz": 1}}, "unknown key 'monitoring.zzz'"),
        ({3: 1}, "unknown key 3"),
        ({"training": {"max_grad_norm": -1}}, "greater than 0"),
        ({"training": {"max_grad_norm": True}}, "expected a number"),
        ({"training": {"max_grad_norm": "inf"}}, "finite number"),
        ({"training": {"gradient_accumulation_steps": 0}}, "greater than or equal to 1"),
        ({"training": {"gradient_accumulation_steps": 2.5}}, "integer"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate = 'fast'"),
        ({"training": {"mixed_precision": "fp8"}}, "'fp32', 'bf16' or 'fp16'"),
        ({"training": 3}, "training = 3"),
        ({"mode": "auto"}, "mode = 'auto'"),
        ({"monitoring": {"loss_window_size": 10**30}}, "less than or equal to 2147483648"),
        ({"monitoring": {"gradient_history_size": 2**63}}, "less than or equal to 2147483648"),
        ({"training": {"gradient_accumulation_steps": 10**30}}, "less than or equal to 2147483648"),
    ],
)
def test_wrong_settings_say_what_where_and_what_to_try(raw: dict, says: str) -> None:
    with pytest.raises(steadystep.ConfigError) as caught:
        Config.load(raw)
    assert says in str(caught.value)
    assert str(caught.value).startswith("config: ")
    assert isinstance(caught.value, ValueError)


def test_a_range_error_says_why() -> None:
    with pytest.raises(steadystep.ConfigError, match=r"\(gradients are scaled down to this global L2 norm"):
        Config.load({"training": {"max_grad_norm": 0}})


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(steadystep.ConfigError) as caught:
        Config.load({"training": {"max_grad_norm": -1, "learning_rate": -1}})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("training: [1\n", ":2: not valid YAML"),
        ("- 1\n", "got a list"),
        ("training:\n  autocast: true\n  autocast: false\n", ":3: not valid YAML (key 'autocast' appears twice)"),
        ("a: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(steadystep.ConfigError) as caught:
        load(tmp_path, text)
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(steadystep.ConfigError, match="no such file"):
        Config.load(tmp_path / "none.yaml")
    with pytest.raises(steadystep.ConfigError, match="Is a directory"):
        Config.load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(steadystep.ConfigError, match="not a UTF-8 text file"):
        Config.load(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("settings", "norm", "value"),
    [
        ({}, None, None),
        ({"gradient_clipping": True}, 1.0, None),
        ({"gradient_clipping": False, "max_grad_norm": 2.0, "max_grad_value": 1.0}, None, None),
        ({"max_grad_norm": 2.0}, 2.0, None),
        ({"gradient_clipping": True, "max_grad_norm": 2.0}, 2.0, None),
        ({"gradient_clipping": True, "max_grad_value": 0.5}, None, 0.5),
    ],
)
def test_what_clipping_means(settings: dict, norm: float | None, value: float | None) -> None:
    training = TrainingSettings(**settings)
    assert (training.clip_norm, training.clip_value) == (norm, value)


numbers = st.floats(min_value=1e-12, max_value=1e12)
trainings = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": numbers,
        "max_grad_norm": numbers,
        "max_grad_value": numbers,
        "gradient_clipping": st.booleans(),
        "gradient_accumulation_steps": st.integers(1, 10_000),
        "mixed_precision": st.sampled_from(["fp32", "bf16", "fp16"]),
        "autocast": st.booleans(),
    },
)


@given(trainings, st.booleans())
def test_what_is_written_is_what_is_read(training: dict, as_text: bool) -> None:
    """Through YAML and back, numbers as text or not: every key arrives."""
    raw: dict[str, Any] = {
        "training": {k: str(v) if as_text and type(v) in (int, float) else v for k, v in training.items()}
    }
    config = Config.load(yaml.safe_load(yaml.safe_dump(raw)))
    assert config.training.model_dump(exclude_unset=True) == training
    assert Config.load(config.model_dump()) == config


@given(st.dictionaries(st.text(max_size=12), st.one_of(st.none(), st.integers(), st.text(max_size=5)), max_size=4))
def test_any_mapping_is_a_config_or_a_config_error(raw: dict) -> None:
    for candidate in (raw, {"training": raw}, {"monitoring": raw}):
        with suppress(steadystep.ConfigError):  # anything else is a defect
            assert isinstance(Config.load(candidate), Config)


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().training.max_grad_norm = 3


def test_learning_rate_sets_the_optimizers_and_keeps_ratios() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}], lr=0.1
    )
    steadystep.Guard(model, optimizer, config={"training": {"learning_rate": "1e-3"}})
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[1]["lr"] == pytest.approx(2e-3)


def test_no_setting_is_parsed_and_then_ignored() -> None:
    """Each key changes something a user can see; a new key has to be added here with its effect."""
    effects = {
        "training.learning_rate": "test_learning_rate_sets_the_optimizers_and_keeps_ratios",
        "training.max_grad_norm": "test_same_bits_as_the_plain_loop",
        "training.max_grad_value": "test_value_clipping_matches_torch",
        "training.gradient_clipping": "test_what_clipping_means",
        "training.gradient_accumulation_steps": "test_same_bits_as_the_plain_loop",
        "training.mixed_precision": "test_same_bits_as_the_plain_loop",
        "training.clip_rule": "test_a_learned_limit_holds_back_what_stands_out_and_resumes",
        "training.lr_scheduler": "test_a_schedule_from_yaml",
        "training.warmup_steps": "test_warmup_alone_is_followed_by_a_constant_rate",
        "training.total_steps": "test_a_schedule_from_yaml",
        "training.min_lr": "test_min_lr_is_a_learning_rate",
        "training.scheduler_options": "test_options_reach_the_schedule",
        "training.fp32_modules": "test_fp32_modules_from_yaml",
        "training.autocast": "test_a_tensor_loss_under_mixed_precision_warns_once",
        "monitoring.log_frequency": "test_layers_at_a_cadence_and_around_an_incident",
        "training.lr_scaling": "test_lr_scaling_follows_the_effective_batch_and_resumes_once",
        "training.early_stopping": "test_early_stopping_after_patience_validations_without_improvement",
        "training.patience": "test_early_stopping_after_patience_validations_without_improvement",
        "monitoring.sinks": "test_sinks_by_name",
        "monitoring.alerts": "test_alerts_is_where_incidents_are_reported",
        "monitoring.sink_frequency": "test_sink_frequency_is_how_often_sinks_are_shown",
        "monitoring.save_checkpoints": "test_save_checkpoints_writes_the_last_state_at_the_end_and_needs_a_folder",
        "monitoring.checkpoint_frequency": "test_checkpoint_frequency_in_minutes",
        "monitoring.keep_checkpoints": "test_keep_checkpoints_is_how_many_stay_and_the_best_one",
        "training.split_when_out_of_memory": "test_split_when_out_of_memory_false_leaves_the_error_alone",
        "training.stability_monitoring": "test_stability_monitoring_false_looks_for_nan_only",
        "training.auto_recovery": "test_auto_recovery_false_keeps_nothing_and_never_goes_back",
        "training.max_recovery_attempts": "test_damage_that_comes_back_ends_in_a_clear_error_with_good_weights",
        "monitoring.loss_window_size": "test_loss_window_size_is_what_a_loss_is_compared_with",
        "monitoring.divergence_threshold": "test_divergence_threshold_is_when_a_loss_is_raised",
        "monitoring.gradient_history_size": "test_gradient_history_size_is_what_a_norm_is_compared_with",
        "monitoring.explosion_threshold": "test_explosion_threshold_is_when_a_gradient_is_held_back",
        "monitoring.corruption_checks": "test_off_means_off",
        "monitoring.recompute_every": "test_a_transient_fault_is_reported_and_leaves_no_trace",
        "monitoring.lr_min": "test_lr_min_is_a_warning_below",
        "monitoring.lr_max": "test_lr_max_is_a_warning_above",
        "recovery.incident_bundles": "test_incident_bundles_false_writes_none",
        "recovery.incident_batch_mb": "test_incident_batch_mb_bounds_what_is_kept_of_the_data",
        "recovery.max_exceptions": "test_three_are_caught_and_the_fourth_is_raised",
        "recovery.max_skips": "test_every_second_batch_bad_stops_too",
        "recovery.trust_steps": "test_trust_steps_is_how_old_a_state_must_be",
        "recovery.lr_mult": "test_lr_mult_is_what_a_rollback_leaves_of_the_rate",
        "recovery.rewarm_steps": "test_rewarm_steps_is_how_long_the_rate_rises",
        "recovery.skip_batches": "test_skip_batches_false_gives_the_random_numbers_back",
        "recovery.snapshots": "test_snapshots_is_how_many_are_kept",
        "recovery.snapshot_memory_gb": "test_snapshot_memory_gb_bounds_them",
        "recovery.snapshot_disk_gb": "test_the_disk_can_be_left_alone",
        "recovery.replay_memory_mb": "test_batches_that_are_too_large_are_not_remembered",
        "recovery.snapshot_time_share": "test_snapshot_time_share_has_no_effect_and_says_so",
        "recovery.max_skips_in_a_row": "test_never_surrenders_stops_when_skipping_does_not_help",
        "mode": "test_observe_is_the_plain_loop_even_when_it_goes_nan",
    }
    known = {"mode"} | {f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields}
    assert known == effects.keys()
    written = "".join(path.read_text() for path in Path(__file__).parent.parent.rglob("test_*.py"))
    assert all(f"def {test}(" in written for test in effects.values())


def test_nan_is_no_setting() -> None:
    with pytest.raises(steadystep.ConfigError):
        Config.load({"training": {"learning_rate": math.nan}})
