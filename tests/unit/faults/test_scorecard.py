"""A scorecard: the runs are what they are called, and the verdicts follow from them."""

import json
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.config import Config
from steadystep.errors import ConfigError, MisuseError
from steadystep.faults import KINDS, NO_FAULT, Fault, parse, scorecard
from steadystep.faults.scorecard import SCORECARD_TRIALS, trials
from steadystep.faults.scorecard_run import End, ScorecardRow
from steadystep.guard import Guard
from steadystep.lab.tasks import TASKS

STEPS, AT = 90, 60


def batches(step: int, seed: int = 0) -> Tensor:
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(1000 * seed + step))


def factory(seed: int) -> Any:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))

    def loss(x: Tensor) -> Tensor:
        return (model(x).squeeze(-1) - x.sum(-1)).square().mean()

    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5),
        batches=lambda step: batches(step, seed),
        loss=loss,
        score=lambda: loss(batches(10**6)).item(),
    )


def alone(seed: int, spec: Any = None, make: Callable[[int], Any] = factory, steps: int = STEPS) -> Any:
    """The loop without us."""
    torch.manual_seed(seed)
    run = make(seed)
    fault: Fault = NO_FAULT
    if spec is not None:
        fault = parse(spec, model=run.model, optimizer=run.optimizer, seed=seed)
    for step in range(steps):
        with fault.at(step):
            run.optimizer.zero_grad()
            fault.loss(step, run.loss(fault.batch(step, run.batches(step)))).backward()
            run.optimizer.step()
    run.model.eval()
    return run


def test_the_runs_are_what_they_are_called() -> None:
    spec = {"kind": "grad-sign-flip", "at": AT, "for": 3}
    card = scorecard(factory, steps=STEPS, kinds=[spec], seeds=(3, 4))
    (row,) = card.rows
    for i, seed in enumerate(card.seeds):
        assert row.clean[i].score == alone(seed).score()
        assert row.unguarded[i].score == alone(seed, spec).score()
    assert row.clean[0].score != row.clean[1].score
    assert row.spec == spec


def test_verdicts_follow_from_the_runs() -> None:
    kinds = ["bad-gradient", "loss-drift", "shuffled-labels", "dead-relus", {"kind": "lr-scale", "factor": 1}]
    card = scorecard(factory, steps=STEPS, kinds=kinds)
    assert [(row.spec["kind"], row.verdict) for row in card.rows] == [
        ("bad-gradient", "saved"),
        ("bad-gradient", "saved"),
        ("loss-drift", "harmless"),
        ("shuffled-labels", "not applicable"),
        ("dead-relus", "not applicable"),
        ("lr-scale", "harmless"),
    ]
    first = card.rows[0]
    assert not first.unguarded[0].finite
    assert first.unguarded[0].stopped.startswith(f"non-finite weights from step {AT + 1}")
    assert first.guarded[0].did == {"skip-step": 1}
    assert first.guarded[0].cause == "non-finite-gradient"
    assert "NaN" in first.guarded[0].said
    assert first.guarded[0].alarms_before == 0
    assert "one tensor" in card.rows[3].why_not
    assert "no nn.ReLU" in card.rows[4].why_not
    assert card.verdicts == {"saved": 2, "harmless": 2, "not applicable": 2}
    shown = str(card)
    assert all(word in shown for word in ("value=inf", "skip-step", "applicable", "2 saved", "step 60"))
    assert "\x1b" not in shown
    told = json.loads(json.dumps(card.as_dict(), allow_nan=False))
    assert told["rows"][0]["verdict"] == "saved"
    assert told["rows"][0]["unguarded"][0]["score"] is None
    assert told["rows"][0]["guarded"][0]["ratio"] == pytest.approx(1.0, rel=0.1)
    assert told["at"] == AT


def test_progress_is_told_before_each_run() -> None:
    told: list[tuple[int, int, str]] = []
    scorecard(factory, steps=STEPS, kinds=["lr-creep"], seeds=(0,), progress=lambda *now: told.append(now))
    assert [now[:2] for now in told] == [(0, 3), (1, 3), (2, 3)]
    assert told[2][2] == "lr-creep growth=1.05, seed 0, guarded"


def test_random_numbers_and_the_log_of_the_process_stay() -> None:
    log = logging.getLogger("steadystep")
    before, level = torch.get_rng_state(), log.level
    scorecard(factory, steps=STEPS, kinds=["bad-gradient"], seeds=(5,))
    assert torch.equal(before, torch.get_rng_state())
    assert log.level == level


def test_both_sides_have_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def spy(model: nn.Module, optimizer: torch.optim.Optimizer, *, config: Config) -> Guard:
        seen.append(config)
        return Guard(model, optimizer, config=config)

    monkeypatch.setattr("steadystep.guard.Guard", spy)
    scorecard(factory, steps=STEPS, kinds=["bad-loss"], config={"training": {"max_grad_norm": 5.0}})
    assert [config.mode for config in seen] == ["observe", "observe", "autopilot"]
    assert {config.training.max_grad_norm for config in seen} == {5.0}


def test_the_lab_tasks_will_do() -> None:
    card = scorecard(TASKS["regression"].make, steps=STEPS, kinds=["bad-input", "stale-batch"])
    assert [row.why_not for row in card.rows] == ["", ""]
    assert card.rows[0].verdict == "saved"


def test_without_a_score_unseen_batches_are_one() -> None:
    def scoreless(seed: int) -> Any:
        made = factory(seed)
        del made.score
        return made

    card = scorecard(scoreless, steps=STEPS, kinds=[])
    assert card.rows == ()
    (row,) = scorecard(scoreless, steps=STEPS, kinds=[{"kind": "lr-scale", "factor": 1}]).rows
    run = alone(0, make=scoreless)
    with torch.no_grad():
        losses = [run.loss(batches(STEPS + i)).double() for i in range(8)]
    assert row.clean[0].score == torch.stack(losses).mean().item()


def test_both_arms_have_the_settings() -> None:
    config = {"training": {"mixed_precision": "fp16", "learning_rate": 0.01}}
    (row,) = scorecard(factory, steps=STEPS, kinds=["fp16-overflow"], config=config).rows
    assert row.guarded[0].did["back-off-scale"] >= 3
    assert row.verdict == "harmless"  # a scaler skips by itself
    assert row.clean[0].score != alone(0).score()


def test_code_that_breaks_on_bad_numbers_did_not_survive() -> None:
    def strict(seed: int) -> Any:
        made = factory(seed)
        plain = made.loss

        def loss(x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("NaN in the data")
            return plain(x)

        made.loss = loss
        return made

    (row,) = scorecard(strict, steps=STEPS, kinds=["bad-input"]).rows
    assert row.unguarded[0].stopped == f"ValueError at step {AT}"
    assert row.verdict == "lost"


def test_a_training_that_breaks_by_itself_is_the_users_to_mend() -> None:
    def broken(seed: int) -> Any:
        made = factory(seed)
        made.loss = lambda x: 1 / 0
        return made

    with pytest.raises(ZeroDivisionError):
        scorecard(broken, steps=STEPS, kinds=["bad-loss"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 89}, "steps = 89: expected at least 90"),
        ({"seeds": ()}, "seeds: expected at least one"),
        ({"kinds": ["bad-los"]}, "kinds: 'bad-los' is unknown: did you mean 'bad-loss'"),
        ({"kinds": [{"kind": "bad-loss", "valu": 1}]}, "kinds: unknown key 'valu'"),
        ({"kinds": [{"kind": "bad-loss", "at": 300}]}, "kinds.at = 300: there are only 300 steps"),
        ({"config": {"training": {"lr": 1}}}, "training.learning_rate"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options: dict[str, Any], said: str) -> None:
    def never(seed: int) -> Any:
        raise AssertionError

    with pytest.raises(ConfigError) as caught:
        scorecard(never, **options)
    assert said in str(caught.value)


def test_a_factory_that_lacks_something_says_what() -> None:
    with pytest.raises(MisuseError, match=r"a SimpleNamespace without optimizer, batches\(step\)"):
        scorecard(lambda _: SimpleNamespace(model=nn.Linear(1, 1), loss=abs))


def test_every_kind_is_tried() -> None:
    assert {trial["kind"] for trial in SCORECARD_TRIALS} == set(KINDS)
    for trial in trials(None, at=50):
        assert parse(
            trial | {"at": 50}, model=nn.Sequential(nn.Linear(1, 1), nn.ReLU()), optimizer=factory(0).optimizer
        )
        assert trial["at"] == 50


GOOD, WORSE, BAD = End(score=1.0, finite=True), End(score=1.3, finite=True), End(score=9.0, finite=True)
LOST, STOPPED = End(score=math.nan, finite=False), End(score=1.0, finite=True, stopped="halted")


@pytest.mark.parametrize(
    ("unguarded", "guarded", "verdict"),
    [
        ([GOOD], [GOOD], "harmless"),
        ([LOST], [GOOD], "saved"),
        ([BAD], [GOOD], "saved"),
        ([LOST], [LOST], "lost"),
        ([LOST], [WORSE], "limited"),
        ([BAD], [WORSE], "limited"),
        ([BAD], [BAD], "lost"),
        ([BAD], [STOPPED], "lost"),
        ([GOOD], [WORSE], "harmed"),
        ([GOOD], [STOPPED], "harmed"),
        ([GOOD, LOST], [GOOD, GOOD], "saved"),
        ([GOOD, LOST], [GOOD, LOST], "lost"),
        ([GOOD, LOST], [GOOD, WORSE], "limited"),
        ([GOOD, GOOD], [GOOD, WORSE], "harmed"),
    ],
)
def test_the_verdict_over_all_seeds(unguarded: list[End], guarded: list[End], verdict: str) -> None:
    row = ScorecardRow(
        spec={},
        label="",
        tolerance=0.1,
        clean=(GOOD,) * len(unguarded),
        unguarded=tuple(unguarded),
        guarded=tuple(guarded),
    )
    assert row.verdict == verdict


@pytest.mark.parametrize(("score", "well"), [(-10.0, True), (-9.1, True), (-8.9, False), (1.0, False)])
def test_a_score_below_zero_has_a_tolerance_too(score: float, well: bool) -> None:
    clean = End(score=-10.0, finite=True)
    assert End(score=score, finite=True).as_well_as(clean, 0.1) is well
    assert math.isnan(clean.ratio(clean))
