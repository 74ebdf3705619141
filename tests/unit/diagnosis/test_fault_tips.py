"""A fault that is named has advice of its own, in `guard.diagnose()` and where a run is read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import steadystep
from steadystep.diagnosis import ADVICE, Cause
from steadystep.diagnosis.advice import advise
from steadystep.diagnosis.causes import Fault
from steadystep.diagnosis.fault_tips import FAULT_TIPS
from steadystep.records import Action, Plan
from steadystep.runs import open_run
from steadystep.runs.diagnosis import diagnose


def test_every_fault_has_advice_that_no_cause_has() -> None:
    assert set(FAULT_TIPS) == set(Fault)
    general = set(ADVICE.values())
    told = [advise(Cause.NO_LEARNING, fault=fault.value) for fault in Fault]
    assert all(told)
    assert len({*told} - general) == len(Fault)


def test_what_was_done_is_told_before_it() -> None:
    plan = Plan(actions=(Action.SKIP_STEP,))
    told = advise(Cause.NO_LEARNING, plan=plan, fault=Fault.EVAL_MODE.value)
    assert told == f"the guard skipped the update; {FAULT_TIPS[Fault.EVAL_MODE][0].text}"


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run whose head is in no optimizer, and the advice of its guard."""
    folder = tmp_path_factory.mktemp("headless")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model[0].parameters(), lr=1e-3)
    with steadystep.Guard(model, optimizer, run_dir=folder, config={"monitoring": {"sinks": []}}) as guard:
        for _ in range(160):
            x = torch.randn(16, 8)
            batch = x, x[:, :3].argmax(1)
            guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch=batch)
        first = guard.diagnose()[0]
    assert first.fault == Fault.WRONG_OPTIMIZER_PARAMS
    return folder, first.advice


def test_a_guard_and_a_reader_of_its_run_give_the_same_advice(headless: tuple[Path, str]) -> None:
    folder, advice = headless
    assert "add_param_group" in advice
    assert diagnose(open_run(folder)).findings[0].advice == advice


def test_a_fault_that_another_version_named_leaves_the_advice_for_its_cause(headless: tuple[Path, str]) -> None:
    run = replace(open_run(headless[0]), fault="unheard-of")
    first = diagnose(run).findings[0]
    assert (first.kind, first.advice) == ("unheard-of", ADVICE[Cause.NO_LEARNING])
