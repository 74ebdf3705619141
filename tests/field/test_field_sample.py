"""A sample of the field in a minute, and tests of its harness. The whole field: `make field`."""

import json
import math
from collections import Counter
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch

from tests.field import loops
from tests.field.__main__ import read
from tests.field.faults import FAULTS
from tests.field.optimizers import OPTIMIZERS
from tests.field.plan import FACES, FIRST_COUNTED, Run, healthy_runs, possible, runs
from tests.field.program import Program
from tests.field.row import alarms_of, for_json, row_of
from tests.field.schedules import SCHEDULES
from tests.field.table import line_of, offends, report
from tests.field.tasks import TASKS
from tests.field.verdict import Row, compared, fit, spread_of, verdict


def sample(task: str, schedule: str, optimizer: str, face: str, num_steps: int, fault: str | None = None) -> Run:
    run = Run(
        index=0,
        task=task,
        schedule=schedule,
        optimizer=optimizer,
        face=face,
        seed=num_steps,
        num_steps=num_steps,
        fault=fault,
    )
    assert possible(run)
    return run


# One of each face in `make test`, the others are slow.
HEALTHY = [
    sample("tabular", "own-cosine", "adamw", "guard-closure", 300),
    sample("digits", "restarts", "sgd-momentum", "guard-loss", 150),
    sample("gan", "constant", "adagrad", "watch", 200),
    sample("diffusion", "hf-cosine", "adamw-fused", "trainer", 250),
    sample("gnn", "lambda", "adafactor", "lightning", 250),
    sample("lstm", "cyclic", "lamb", "accelerate", 250),
]
MORE_HEALTHY = [
    sample("vae", "own-wsd", "rmsprop", "guard-closure", 250),
    sample("contrastive", "own-plateau", "adamax", "guard-closure", 300),
    sample("dqn", "own-linear", "adam", "guard-loss", 300),
    sample("regression", "one-cycle", "nadam", "watch", 400),
    sample("lora", "by-hand", "lion", "watch", 300),
    sample("ppo", "step", "amsgrad", "guard-closure", 200),
]
FAULTY = [
    sample("regression", "step", "sgd-momentum", "guard-loss", 200, "gradients-1000-for-15"),
    sample("contrastive", "lambda", "sgd", "watch", 200, "nan-weight"),
    sample("regression", "constant", "adam", "lightning", 200, "lr-100-for-20"),
]
MORE_FAULTY = [
    sample("tabular", "constant", "adamw", "guard-closure", 200, "nan-gradient"),
    sample("diffusion", "hf-cosine", "adam", "trainer", 200, "nan-batches-5"),
    sample("lora", "constant", "rmsprop", "accelerate", 200, "flipped-bit"),
]


def name_of(run: Run) -> str:
    return "-".join(part for part in (run.task, run.schedule, run.optimizer, run.face, run.fault) if part)


def quick_and_slow(quick: list[Run], slow: list[Run]) -> list:
    cases = [pytest.param(run, id=name_of(run)) for run in quick]
    return cases + [pytest.param(run, id=name_of(run), marks=pytest.mark.slow) for run in slow]


@pytest.mark.parametrize("run", quick_and_slow(HEALTHY, MORE_HEALTHY))
def test_a_healthy_run_is_left_alone(run: Run) -> None:
    row = row_of(run)
    assert row["fit"]
    assert row["ok"], line_of(row | {"code": ""})


@pytest.mark.parametrize("run", quick_and_slow(FAULTY, MORE_FAULTY))
def test_a_faulty_run_never_ends_worse_for_being_guarded(run: Run) -> None:
    row = row_of(run)
    assert row["fit"]
    assert not row["harm"], line_of(row | {"code": ""})


@pytest.mark.parametrize("task", TASKS)
def test_a_plain_run_repeats_itself_bit_for_bit(task: str) -> None:
    run = Run(index=0, task=task, schedule="one-cycle", optimizer="adamw", face="watch", seed=5, num_steps=30)
    first, second = (loops.plain(Program.of(run)) for _ in range(2))
    assert first.same_weights(second)
    assert first.score == second.score
    assert not first.same_weights(loops.plain(Program.of(run.clean(seed=6))))


def test_scoring_leaves_no_trace() -> None:
    for kind in TASKS.values():
        task = kind(0)
        before = torch.get_rng_state(), task.rng.get_state()
        modes = [module.training for player in task.players for module in player.model.modules()]
        assert task.held_out() == task.held_out()
        assert torch.equal(before[0], torch.get_rng_state())
        assert torch.equal(before[1], task.rng.get_state())
        assert modes == [module.training for player in task.players for module in player.model.modules()]


def test_the_plan_is_the_same_every_time_and_holds_everything() -> None:
    plan = list(runs(400))
    assert plan == list(runs(400))
    assert plan[:50] == list(runs(50))
    for key, known in {"task": TASKS, "schedule": SCHEDULES, "optimizer": OPTIMIZERS, "face": FACES}.items():
        assert {getattr(run, key) for run in plan} == set(known)
    assert {run.fault for run in plan} == {None, *FAULTS}
    assert 0.6 < sum(run.fault is None for run in plan) / 400 < 0.7
    assert all(0.3 <= run.fault_at / run.num_steps + 0.01 <= 0.62 for run in plan)
    assert Counter(asdict(run)["index"] for run in plan).most_common(1)[0][1] == 1


def test_the_halves_share_no_run() -> None:
    develop, sealed = list(runs(400, "develop")), list(runs(400, "sealed"))
    assert len(develop) == len(sealed) == 200
    programs = [
        {(r.task, r.schedule, r.optimizer, r.face, r.seed, r.fault) for r in half} for half in (develop, sealed)
    ]
    assert not programs[0] & programs[1]


def test_false_alarms_are_counted_on_runs_of_their_own() -> None:
    counted = list(healthy_runs(20_000))
    assert all(run.fault is None and run.index >= FIRST_COUNTED for run in counted)
    assert sum(run.num_steps for run in counted[:-1]) < 20_000 <= sum(run.num_steps for run in counted)


def test_a_run_that_is_only_counted_claims_no_comparison() -> None:
    row = alarms_of(sample("regression", "constant", "adam", "guard-loss", 60)) | {"code": ""}
    assert (row["warnings"], row["acts"], row["error"], row["identical"]) == (0, 0, "", None)
    assert "not compared" in report([row])
    loud = row | {"warnings": 1, "warned": [{"severity": "warn", "detector": "x", "step": 3}], "ok": False, "fit": True}
    assert offends(loud)
    assert "weights differ" not in line_of(loud)


def judged(**changed: object) -> Row:
    row: Row = {
        "fault": None,
        "identical": True,
        "warnings": 0,
        "acts": 0,
        "error": "",
        "cause": "healthy",
        "plain_score": 1.0,
        "guarded_score": 1.0,
        "clean_score": 1.0,
        "spread": 0.1,
        "higher_is_better": False,
    }
    return verdict(row | changed)


def test_the_verdict_notices_whatever_touches_a_healthy_run() -> None:
    assert judged()["ok"]
    for changed in ({"identical": False}, {"warnings": 1}, {"acts": 1}, {"error": "x"}, {"cause": "oscillation"}):
        assert not judged(**changed)["ok"]


def test_the_verdict_notices_harm_and_benefit() -> None:
    worse = {"identical": False, "guarded_score": 1.2}
    assert judged(**worse)["harm"]
    assert not judged(**worse, higher_is_better=True)["harm"]
    assert judged(**worse, higher_is_better=True, fault="x")["benefit"]
    assert not judged(**worse, spread=0.3)["harm"]
    assert judged(identical=False, guarded_score=math.nan)["harm"]
    both = judged(identical=False, guarded_score=math.nan, plain_score=math.nan, fault="x")
    assert (both["harm"], both["benefit"], both["plain_versus_clean"]) == (False, False, "worse")
    saved = judged(identical=False, plain_score=math.nan, fault="x")
    assert (saved["harm"], saved["benefit"]) == (False, True)


def test_a_spread_without_numbers_tells_nothing() -> None:
    assert spread_of([1.0, 1.5, 0.5]) == 1.0
    assert compared(9.0, 1.0, spread=spread_of([1.0, math.nan]), higher_is_better=False) == "equal"


def test_a_program_that_does_not_learn_is_not_judged() -> None:
    judge = {"higher_is_better": False, "learning_judged": True}
    assert fit(0.5, 1.0, **judge)
    assert not fit(0.95, 1.0, **judge)
    assert not fit(math.nan, 1.0, **judge)
    assert fit(0.95, 1.0, higher_is_better=False, learning_judged=False)
    assert fit(-2.0, -1.0, **judge)


def test_harm_on_purpose_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that stops updating after 20 steps ends worse, and the row says so."""
    from steadystep import Guard, Outcome, Plan

    taken = Guard.step

    def step(self: Guard, *args: object, **kwargs: object) -> Outcome:
        if self.attempts > 20:
            return Outcome(step=self.attempts, reading=1.0, stepped=False, plan=Plan(actions=("skip-step",)))
        return taken(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Guard, "step", step)
    row = row_of(sample("regression", "constant", "adam", "guard-loss", 200)) | {"code": ""}
    assert row["harm"]
    assert offends(row)
    assert row["acts"] > 100
    assert "HARM" in report([row])


def test_schedules_of_the_guard_have_the_same_rates_by_hand() -> None:
    for name, info in SCHEDULES.items():
        if info.owned and not info.validates:
            task = TASKS["regression"](0)
            optimizer = OPTIMIZERS["sgd"].on(type(task), task.model.parameters())
            rate = info.make(optimizer, 100)
            seen = []
            for step in range(100):
                rate.before(step, guarded=False)
                seen.append(optimizer.param_groups[0]["lr"])
            assert max(seen) == rate.bases[0], name
            assert any(a != b for a, b in pairwise(seen))


def test_rows_survive_json(tmp_path) -> None:
    row = {"index": 3, "plain_score": math.nan, "guarded_score": 1.0, "clean_score": 2.0, "start_score": 1.0}
    row |= {"spread": math.inf, "acted": [{"step": 1}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(for_json(row)) + "\n{half a li")
    found = read(path)[3]
    assert math.isnan(found["plain_score"])
    assert found["spread"] == math.inf
