"""Names users rely on. A change here is a change for them: say so in the CHANGELOG."""

import ast
import inspect
import pickle
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import steadystep
from steadystep.config import Config

pytestmark = pytest.mark.core

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
    "examine",
    "faults",
    "find_lr",
    "groups",
    "incidents",
    "init",
    "layers",
    "memory",
    "observe",
    "precision",
    "read_run",
    "rl",
    "schedule",
    "testing",
    "tracking",
    "watch",
]


def test_all_is_what_it_was() -> None:
    assert sorted(steadystep.__all__) == PUBLIC
    assert dir(steadystep) == steadystep.__all__


def test_the_stub_is_the_only_list() -> None:
    stub = ast.parse(Path(steadystep.__file__).with_suffix(".pyi").read_text())
    assert all(isinstance(node, ast.ImportFrom) for node in stub.body)
    exported = [(n.module, a.name, a.asname) for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert sorted(name for _, name, _ in exported) == PUBLIC
    for module, name, alias in exported:
        assert alias == name, "without `as` a stub does not export"
        thing = getattr(steadystep, name)
        if module == "steadystep" and name != "__version__":
            assert thing is sys.modules[f"steadystep.{name}"]
        else:
            assert thing is getattr(sys.modules[module or ""], name)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads_and_says_what_it_is(name: str) -> None:
    thing = getattr(steadystep, name)
    assert isinstance(thing, str) or inspect.getdoc(thing)
    if isinstance(thing, type):
        assert vars(thing)["__doc__"], "a docstring of its own, not one that it inherits"
        assert pickle.loads(pickle.dumps(thing)) is thing


def test_loading_a_name_leaves_the_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draws_on_import.py").write_text("import random\nnumber = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(steadystep._homes, "number", "draws_on_import")
    before = random.getstate()
    assert isinstance(steadystep.number, float)
    assert random.getstate() == before


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gard'"):
        steadystep.Gard  # noqa: B018


def test_the_guards_face() -> None:
    members = sorted(n for n in vars(steadystep.Guard) if not n.startswith("_"))
    saved = ["keep", "load_state_dict", "restore_best", "resume", "save", "state_dict", "wait_for"]
    steps = ["batches", "commit", "diagnose", "epoch", "examine", "flush", "inspect", "should_stop", "step", "validate"]
    assert members == sorted(["attempts", "close", "editing", "quarantined", "updates", *steps, *saved])
    assert list(inspect.signature(steadystep.Guard).parameters) == [
        "model",
        "optimizer",
        "config",
        "schedule",
        "run_dir",
        "detectors",
        "sinks",
        "force",
        "hparams",
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
            "alerts",
            "checkpoint_frequency",
            "corruption_checks",
            "divergence_threshold",
            "explosion_threshold",
            "gradient_history_size",
            "keep_checkpoints",
            "log_frequency",
            "loss_window_size",
            "lr_max",
            "lr_min",
            "recompute_every",
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


def test_it_is_imported_from_a_zip_too(tmp_path: Path) -> None:
    package, archive = Path(steadystep.__file__).parent, tmp_path / "steadystep.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in [*package.rglob("*.py"), *package.rglob("*.pyi")]:
            zipped.write(path, Path("steadystep") / path.relative_to(package))
    code = f"import sys; sys.path.insert(0, {str(archive)!r})\nimport steadystep as s\nprint(s.__file__, s.Config)"
    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert str(archive) in said
