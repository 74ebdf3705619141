"""Five frozen records that survive JSON."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadystep.errors import ConfigError, MisuseError, SteadystepError, TrainingHalted, UnsupportedError
from steadystep.records import (
    GRAVE,
    LOUD,
    SEVERITIES,
    ActionName,
    Damage,
    Diagnosis,
    Finding,
    Outcome,
    Plan,
    Signals,
    severity_rank,
)

pytestmark = pytest.mark.core

any_float = st.floats(allow_nan=True, allow_infinity=True)
words = st.text(max_size=8)
names = st.lists(words, max_size=3).map(tuple)

findings = st.builds(
    Finding,
    detector=words,
    step=st.integers(0, 10**12),
    severity=st.sampled_from(["info", "warn", "act", "critical"]),
    value=any_float,
    limit=any_float,
    what=words,
    where=names,
)
signals = st.builds(
    Signals,
    step=st.integers(0, 10**12),
    loss=any_float,
    losses=st.lists(any_float, max_size=3).map(tuple),
    grad_norm=any_float,
    norms=st.lists(any_float, max_size=3).map(tuple),
    names=names,
    bad_buffers=names,
    lr=any_float,
    scale=any_float,
    scaled=st.booleans(),
    input_finite=st.sampled_from([None, True, False]),
    repeatable=st.booleans(),
    metrics=st.dictionaries(words, any_float, max_size=3),
)
diagnoses = st.builds(
    Diagnosis,
    cause=words,
    damage=st.sampled_from(list(Damage)),
    findings=st.lists(findings, max_size=2).map(tuple),
    evidence=words,
    advice=words,
)
plans = st.builds(Plan, actions=st.lists(st.sampled_from(get_args(ActionName)), max_size=3).map(tuple), reason=words)
outcomes = st.builds(
    Outcome,
    step=st.integers(0, 10**12),
    reading=any_float,
    stepped=st.booleans(),
    pending=st.booleans(),
    plan=plans,
    diagnosis=diagnoses,
    signals=st.none() | signals,
    left_out=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    clipped=st.booleans(),
)


@given(st.one_of(findings, signals, diagnoses, plans, outcomes))
def test_json_gives_back_the_same_record(record: Signals | Finding | Diagnosis | Plan | Outcome) -> None:
    text = record.to_json()
    json.loads(text, parse_constant=pytest.fail)  # strict JSON: no bare NaN
    again = type(record).from_json(text)
    assert repr(again) == repr(record)
    assert type(again) is type(record)


@pytest.mark.parametrize("kind", [Signals, Finding, Diagnosis, Plan, Outcome])
def test_records_are_frozen_and_keyword_only(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert not hasattr(kind, "__dict__") or "__dict__" not in kind.__slots__


def test_a_frozen_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().reason = "x"


@given(any_float, any_float, names)
def test_healthy_means_nothing_is_bad(loss: float, norm: float, bad: tuple[str, ...]) -> None:
    record = Signals(step=0, loss=loss, grad_norm=norm, bad_buffers=bad)
    assert record.all_finite == (math.isfinite(loss) and math.isfinite(norm) and not bad)


def test_numbers_whose_sum_overflows_are_still_finite() -> None:
    assert Signals(step=0, loss=1.7e308, grad_norm=1.7e308).all_finite


def test_a_pending_outcome_reads_its_loss_only_when_asked() -> None:
    outcome = Outcome(step=0, reading=torch.tensor(2.5), stepped=False, pending=True)
    assert outcome.loss == 2.5
    assert Outcome.from_json(outcome.to_json()).loss == 2.5


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="extra"):
        Plan.from_json('{"actions": [], "reason": "", "extra": 1}')


def test_the_tree_of_errors() -> None:
    for error, builtin in (
        (ConfigError, ValueError),
        (MisuseError, RuntimeError),
        (UnsupportedError, NotImplementedError),
    ):
        assert issubclass(error, SteadystepError)
        assert issubclass(error, builtin)
    halted = TrainingHalted(step=7, what="the loss is NaN", did="skipped", try_next="clean the data")
    assert isinstance(halted, SteadystepError)
    assert str(halted) == "training halted at step 7: the loss is NaN\n  did: skipped\n  try: clean the data"
    again = pickle.loads(pickle.dumps(halted))
    assert (again.step, again.what, again.did, again.try_next) == (7, "the loss is NaN", "skipped", "clean the data")


def test_stages_between_the_ends_run_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it would fail
import steadystep
from steadystep import Signals, Config
from steadystep.detectors import NonFinite
from steadystep.diagnosis import explain
from steadystep.policy import Budget, decide
signals = Signals(step=3, loss=float("nan"), grad_norm=1.0)
diagnosis = explain(signals, NonFinite().update(signals))
print(decide(signals, diagnosis, budget=Budget()).actions, Config().mode)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "('skip-step',) autopilot\n"


def test_the_learning_rate_in_use_is_in_the_outcome() -> None:
    signals = Signals(step=3, loss=1.0, grad_norm=1.0, lr=0.2)
    assert Outcome(step=3, reading=1.0, stepped=True, signals=signals, lr_mult=0.25).lr == pytest.approx(0.05)
    assert Outcome(step=3, reading=1.0, stepped=False, pending=True).lr == 0.0


def test_severities_have_one_order() -> None:
    assert [severity_rank(severity) for severity in SEVERITIES] == [0, 1, 2, 3]
    assert severity_rank("of another version") == 0
    assert LOUD == ("warn", "act", "critical")
    assert GRAVE == ("act", "critical")
