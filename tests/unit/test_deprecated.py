"""Names of before work, and say what they are called now."""

import importlib
import json
import sys
import warnings

import pytest

import steadystep
from steadystep import Config, Finding, Outcome, Plan, Signals, _deprecated
from steadystep.records import Counterfactual

PLAIN = Signals(step=3, loss=1.0, grad_norm=2.0, counterfactual=Counterfactual(step=1, old_loss=0.5, current_loss=0.75))

REFERENCE = {
    "steadystep.check": "Hit Item RULES Report Rule check_path check_script",
    "steadystep.compare": "Comparison Level compare compare_page level",
    "steadystep.curves": "Pattern PlannedAction Reading diagnose find_runs open_run",
    "steadystep.dashboard": "Library make_app",
    "steadystep.diagnosis": (
        "ADVICE Casebook Cause Evidence LASTING Verdict exception_in_step explain first_sign needs_witness "
        "not_repeatable weigh"
    ),
    "steadystep.incidents": (
        "Bundle Case Examination Examiner History Incidents Origin Replay examine locate read_bundle replay "
        "write_bundle"
    ),
    "steadystep.probe": "LRCurve Verdict find_lr",
    "steadystep.recovery": (
        "BackgroundWriter Checkpoint Holdings InMemory NoRecovery Packed Recovery Shelf Snapshot Snapshots "
        "pack read_checkpoint unpack write_checkpoint"
    ),
    "steadystep.report": "Thinned report_page thin",
    "steadystep.track": (
        "Broadcast Follower GradientSample Incident LayerNorms MLflow NoLog Run RunLog RunStart Series Sink "
        "StepRow TensorBoard Terminal Tracker Tracking WandB default_sinks describe named_sinks read"
    ),
}
"""Public names as they were before the move, for the modules in which any of them changed."""


@pytest.mark.parametrize("old", _deprecated.MODULES)
def test_a_module_is_found_by_its_old_name(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {_deprecated.MODULES[old]}"):
        module = importlib.import_module(old)
    new = importlib.import_module(_deprecated.MODULES[old])
    for name in getattr(new, "__all__", ()):
        assert getattr(module, name) is getattr(new, name)
    for name, place in _deprecated.ELSEWHERE.get(old, {}).items():
        home, _, its = place.partition(":")
        assert getattr(module, name) is getattr(importlib.import_module(home), its)
    with pytest.raises(AttributeError):
        _ = module.nothing_of_the_kind


def test_the_way_a_user_wrote_it() -> None:
    for name in ("steadystep.recovery", "steadystep.track"):
        sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match="is now"):
        from steadystep.recovery import Shelf
    with pytest.warns(DeprecationWarning, match="is now"):
        track = steadystep.__getattr__("track")  # why: the attribute is there once the module was imported
    assert Shelf is steadystep.checkpoints.CheckpointStore
    assert track.RunLog is steadystep.tracking.RunLog
    with pytest.warns(DeprecationWarning, match="NaNTracer"):
        assert steadystep.incidents.Examiner is steadystep.incidents.NaNTracer


@pytest.mark.parametrize(
    ("module", "old"), [(module, old) for module, names in _deprecated.NAMES.items() for old in names]
)
def test_a_name_of_a_module_that_stayed(module: str, old: str) -> None:
    home, new = importlib.import_module(module), _deprecated.NAMES[module][old]
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {module}.{new}"):
        assert getattr(home, old) is getattr(home, new)


@pytest.mark.parametrize("module", REFERENCE)
def test_every_public_name_of_before_is_found(module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        home = importlib.import_module(module)
        for name in REFERENCE[module].split():
            assert getattr(home, name) is not None


def test_fields_are_read_by_their_old_names() -> None:
    finding = Finding(detector="a", step=1, severity="warn", value=1.0, limit=2.0, baseline=3.0)
    plan = Plan(actions=("skip-step",))
    outcome = Outcome(step=1, reading=1.0, stepped=True, plan=plan, replayed=4)
    told = PLAIN.counterfactual
    old = [
        (finding, "usual", 3.0),
        (plan, "steps", ("skip-step",)),
        (outcome, "caught_up", 4),
        (PLAIN, "healthy", True),
        (PLAIN, "witness", told),
        (told, "then", 0.5),
        (told, "now", 0.75),
    ]
    assert {(type(record).__name__, name) for record, name, _ in old} == {
        (record, name) for record, names in _deprecated.FIELDS.items() for name in names
    }
    for record, name, value in old:
        with pytest.warns(DeprecationWarning, match=rf"\.{name} is now"):
            assert getattr(record, name) == value


def test_a_detector_of_before_makes_its_findings() -> None:
    with pytest.warns(DeprecationWarning, match="usual"):
        made = Finding(detector="mine", step=1, severity="warn", value=1.0, limit=2.0, usual=3.0)
    assert made == Finding(detector="mine", step=1, severity="warn", value=1.0, limit=2.0, baseline=3.0)
    with pytest.warns(DeprecationWarning, match="is now"):
        assert Counterfactual(step=1, then=0.5, now=0.75) == PLAIN.counterfactual
    with pytest.raises(TypeError):
        Finding(detector="mine", step=1, severity="warn", value=1.0, limit=2.0, unknown=3.0)


def test_a_record_of_before_is_read() -> None:
    now = Outcome(
        step=1, reading=1.0, stepped=False, plan=Plan(actions=("rollback", "replay")), signals=PLAIN, replayed=2
    )
    text = now.to_json()
    renamed = {
        "actions": "steps",
        "counterfactual": "witness",
        "old_loss": "then",
        "current_loss": "now",
        "baseline": "usual",
    }
    renamed |= {"replayed": "caught_up"}
    for new, old in renamed.items():
        text = text.replace(f'"{new}"', f'"{old}"')
    text = text.replace('"replay"', '"catch-up"')
    assert "witness" in text
    assert Outcome.from_json(text) == now
    with pytest.raises(ValueError, match="unheard"):
        Outcome.from_json(json.dumps(json.loads(text) | {"unheard": 1}))


def test_a_setting_of_before_counts() -> None:
    with pytest.warns(DeprecationWarning, match="replay_memory_mb"):
        config = Config.load({"recovery": {"catch_up_memory_mb": 7}})
    assert config.recovery.replay_memory_mb == 7


def test_the_new_names_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PLAIN.all_finite
        assert Config.load({"recovery": {"replay_memory_mb": 7}}).recovery.replay_memory_mb == 7


@pytest.mark.parametrize(
    "line",
    [
        "import steadystep.track",
        "from steadystep.curves import open_run",
        "from steadystep import track",
        "steadystep.track",
    ],
)
def test_the_warning_points_at_the_users_line(line: str) -> None:
    for name in ("steadystep.track", "steadystep.curves"):
        sys.modules.pop(name, None)
    steadystep.__dict__.pop("track", None)
    with pytest.warns(DeprecationWarning, match="is now") as caught:
        exec(compile(line, "loop.py", "exec"), {"steadystep": steadystep, "__name__": "loop"})
    assert {warning.filename for warning in caught} == {"loop.py"}
