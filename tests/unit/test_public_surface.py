"""Names users rely on. A change here is a change for them: say so in the CHANGELOG."""

import inspect
import subprocess
import sys

import pytest

import steadystep
from steadystep.config import Config

PUBLIC = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "Diagnosis",
    "Finding",
    "Guard",
    "MisuseError",
    "Outcome",
    "Plan",
    "Signals",
    "SteadystepError",
    "TrainingHalted",
    "UnsupportedError",
    "__version__",
    "autopilot",
    "careful",
    "checkpoints",
    "clip",
    "detectors",
    "faults",
    "find_lr",
    "groups",
    "incidents",
    "init",
    "layers",
    "memory",
    "observe",
    "precision",
    "schedule",
    "testing",
    "tracking",
    "watch",
]


def test_all_is_what_it_was() -> None:
    assert sorted(steadystep.__all__) == PUBLIC
    assert dir(steadystep) == steadystep.__all__


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(steadystep, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gard'"):
        steadystep.Gard  # noqa: B018


def test_the_guards_face() -> None:
    members = sorted(n for n in vars(steadystep.Guard) if not n.startswith("_"))
    saved = ["keep", "load_state_dict", "restore_best", "resume", "save", "state_dict"]
    steps = ["batches", "commit", "diagnose", "epoch", "flush", "inspect", "should_stop", "step", "validate"]
    assert members == sorted(["close", "editing", *steps, *saved])
    assert list(inspect.signature(steadystep.Guard).parameters) == [
        "model",
        "optimizer",
        "config",
        "schedule",
        "run_dir",
        "detectors",
        "sinks",
        "force",
    ]
    assert list(inspect.signature(steadystep.Guard.step).parameters)[2:] == ["batch", "weight", "metrics"]


def test_the_settings() -> None:
    assert {
        name: sorted(type(getattr(Config(), name)).model_fields) for name in Config.model_fields if name != "mode"
    } == {
        "training": [
            "auto_recovery",
            "autocast",
            "clip_rule",
            "early_stopping",
            "fp32_modules",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "learning_rate",
            "lr_scaling",
            "lr_scheduler",
            "max_grad_norm",
            "max_grad_value",
            "max_recovery_attempts",
            "min_lr",
            "mixed_precision",
            "patience",
            "scheduler_options",
            "split_when_out_of_memory",
            "stability_monitoring",
            "total_steps",
            "warmup_steps",
        ],
        "monitoring": [
            "checkpoint_frequency",
            "divergence_threshold",
            "explosion_threshold",
            "gradient_history_size",
            "keep_checkpoints",
            "log_frequency",
            "loss_window_size",
            "lr_max",
            "lr_min",
            "save_checkpoints",
            "sink_frequency",
            "sinks",
        ],
        "recovery": [
            "incident_batch_mb",
            "incident_bundles",
            "lr_mult",
            "max_exceptions",
            "max_skips",
            "max_skips_in_a_row",
            "replay_memory_mb",
            "rewarm_steps",
            "skip_batches",
            "snapshot_disk_gb",
            "snapshot_memory_gb",
            "snapshot_time_share",
            "snapshots",
            "trust_steps",
        ],
    }


def test_importing_steadystep_imports_nothing_heavy() -> None:
    code = (
        "import sys, steadystep; print([m for m in ('torch', 'numpy', 'pydantic', 'yaml', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
