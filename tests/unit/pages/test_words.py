"""Sentences that were once wrong: each says what is so."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import steadystep
from steadystep.errors import ConfigError, TrainingHalted
from steadystep.records import Outcome, Plan
from steadystep.runs.comparison import compare
from steadystep.runs.run import Run, Series
from steadystep.tracking import describe
from steadystep.train import RunPlan
from tests.unit.pages.report_runs import made_run


def validated(name: str, steps: list[int], losses: list[float], *, length: int) -> Run:
    falling = Series(np.arange(length), np.linspace(4.0, 2.0, length))
    held_out = Series(np.array(steps), np.array(losses))
    return made_run(name=name, troubled=False, loss=falling, validation={"val_loss": held_out})


def test_compare_does_not_call_a_run_lost_that_was_validated_later() -> None:
    """One halted at step 150 after a validation at 100, the other is validated every 500 steps and ends well."""
    short = validated("short", [100], [3.0], length=150)
    long = validated("long", [500, 1000], [2.5, 2.0], length=1000)
    found = compare([short, long])
    assert found.judged_by == "training loss"
    assert "finite" not in found.said


def test_compare_says_which_had_nothing_to_compare() -> None:
    lost = validated("lost", [500, 1000], [math.nan, math.nan], length=1000)
    good = validated("good", [500, 1000], [2.5, 2.0], length=1000)
    assert compare([lost, good]).said == (
        "good is the only run with a finite held-out loss. lost ended without a finite held-out loss."
    )
    empty = made_run(name="empty", loss=Series(), validation={}, troubled=False)
    assert compare([empty, good]).said == ("good is the only run with a finite training loss. empty logged none.")


@pytest.mark.parametrize(("times", "lr"), [(1.0, 300.0), (30.0, 1e-4)])
def test_large_weights_are_blamed_on_the_beginning_where_no_update_made_them(times: float, lr: float) -> None:
    """They are first seen after the first update, and a learning rate of 300 makes small ones large by then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(times)
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=lr), config=steadystep.observe())
    for _ in range(40):
        x = torch.randn(16, 4)
        guard.step(lambda x: (model(x) - x.sum(-1, keepdim=True)).square().mean(), batch=x)
    found = guard.diagnose()
    said = any("variance above 10" in diagnosis.evidence for diagnosis in found)
    assert said == (times > 1.0)
    assert found[0].cause == ("poor-initialisation" if said else "learning-rate-too-high")
    assert not any("began with" in diagnosis.evidence for diagnosis in found)


def test_the_initial_weights_are_not_called_a_step() -> None:
    plan = Plan(actions=("rollback",), reason="divergence", to=-1)
    assert "rolled back to the initial state [" in describe(
        Outcome(step=9, reading=1.0, stepped=False, plan=plan, restored=0)
    )
    moments = Plan(actions=("restore-moments",), reason="poisoned-moments", to=-1)
    assert "optimizer restored to the initial state" in describe(
        Outcome(step=9, reading=1.0, stepped=True, plan=moments)
    )
    later = Plan(actions=("rollback",), reason="divergence", to=20)
    assert "rolled back to step 20 [" in describe(Outcome(step=30, reading=1.0, stepped=False, plan=later, restored=21))


def test_a_halt_does_not_call_weights_good_that_nobody_has_judged() -> None:
    """Every batch since the weights were ruined is refused; the ruined weights are what is there."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = steadystep.Guard(model, optimizer, config={"recovery": {"max_skips_in_a_row": 3, "snapshots": 0}})
    guard.step(lambda: model(torch.ones(2, 2)).square().mean())
    with torch.no_grad():
        model.weight.fill_(1e19)
    for _ in range(2):
        assert not guard.step(lambda: model(torch.ones(2, 2)).square().mean()).stepped
    with pytest.raises(TrainingHalted) as halted:
        guard.step(lambda: model(torch.ones(2, 2)).square().mean())
    assert "good" not in str(halted.value)
    assert "the weights are those after the last accepted update" in str(halted.value)


def test_an_incident_under_watch_says_how_it_could_be_run_again() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with steadystep.watch(model, optimizer) as watcher:
        (
            torch.autograd.grad(model(torch.ones(2, 2)).sum(), model.weight)[0].sum() * 0 + model.bias.sum() * math.nan
        ).backward()
        optimizer.step()
        assert watcher.outcome is not None
        assert "given as a tensor" not in watcher.outcome.origin


@pytest.mark.parametrize("setter", ["lr_scheduler: cosine", "warmup_steps: 10"])
@pytest.mark.parametrize("kind", ["lr-scale", "lr-creep"])
def test_a_fault_that_a_schedule_would_overrule_is_refused(tmp_path: Path, setter: str, kind: str) -> None:
    file = tmp_path / "plan.yaml"
    text = f"task: moons\nfaults: {{kind: {kind}, at: 20}}\ntraining: {{total_steps: 60, {setter}}}\n"
    file.write_text(text)
    with pytest.raises(
        ConfigError, match=rf"faults: {kind} has no effect here, because training\.{setter.split(':')[0]}"
    ):
        RunPlan.load(file)
    file.write_text(text.replace(f", {setter}", ""))
    assert RunPlan.load(file).run.faults[0]["kind"] == kind
