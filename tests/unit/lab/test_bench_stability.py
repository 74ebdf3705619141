"""`bench stability`: what counts as failed, what the table says, and a run small enough for a test."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from steadystep.lab.bench import Choice, Row, StudyJob, stability
from steadystep.lab.bench.stability import ARMS, STUDY, failed, figure, steps_to, summary, table

NAN = math.nan


def row(arm: str, seed: int, held_out: float, curve: list[list[float]]) -> Row:
    return {
        "arm": arm,
        "seed": seed,
        "num_steps": 30,
        "held_out": held_out,
        "curve": curve,
        "seconds": 2.0,
        "interventions": 0,
    }


ROWS = [
    row("no measures", 1, NAN, [[0, 5.0], [10, 9.0], [20, NAN]]),
    row("no measures", 2, 2.9, [[0, 5.0], [10, 3.0], [20, 2.9], [30, 2.9]]),
    row("clip only", 1, 2.6, [[0, 5.0], [10, 2.9], [20, 2.67], [30, 2.6]]),
    row("clip only", 2, 2.4, [[0, 5.0], [10, 2.6], [20, 2.5], [30, 2.4]]),
    row("clip + warm-up", 1, 2.59, [[0, 5.0], [10, 2.9], [20, 2.8], [30, 2.6]]),
    row("everything", 1, 2.41, [[0, 5.0], [10, 2.6], [20, 2.5], [30, 2.4]]),
]


def test_every_arm_has_every_seed() -> None:
    jobs = STUDY.jobs(Choice())
    assert {(job.args["arm"], job.args["seed"]) for job in jobs} == {(a, s) for a in ARMS for s in range(100, 110)}
    assert {job.args["num_steps"] for job in jobs} == {300}
    assert {job.args["seed"] for job in STUDY.jobs(Choice(seeds=(4, 5)))} == {4, 5}


def test_the_summary_counts_what_the_docs_define() -> None:
    told = summary(ROWS)
    none, clip = told["arms"]["no measures"], told["arms"]["clip only"]
    assert told["best"] == 2.4
    assert (none["lost"], none["failed"], none["lost_at"], none["held_out"]) == (1, 2, 20, 2.9)
    assert (none["reached"], none["steps_to_target"]) == (0, math.inf)
    assert (clip["lost"], clip["failed"], clip["reached"], clip["steps_to_target"]) == (0, 1, 2, 15)
    assert clip["held_out"] == pytest.approx(2.5)
    assert told["arms"]["clip + warm-up"]["failed"] == 0  # 0.19 worse than the best


@given(st.floats(0, 10), st.floats())
def test_failing_is_monotone(best: float, held_out: float) -> None:
    if failed(held_out, best=best):
        assert failed(held_out + 1.0, best=best)
        assert not abs(held_out - best) < stability.MARGIN * 0.999
    else:
        assert held_out < best + stability.MARGIN


@given(st.lists(st.floats(0, 6) | st.just(NAN), max_size=20), st.floats(0, 6))
def test_steps_to_a_target_is_the_first_look_below_it(losses: list[float], target: float) -> None:
    curve = [[10 * n, loss] for n, loss in enumerate(losses)]
    found = steps_to(target, curve)
    before = losses if found is None else losses[: found // 10]
    assert not any(loss <= target for loss in before)
    assert found is None or losses[found // 10] <= target


def test_the_table_fits_a_terminal_and_shows_half_a_study() -> None:
    for rows in (ROWS, ROWS[:3]):
        console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(table(rows))
        text = console.export_text()
        console.file.close()
        assert "…" not in text
        assert "1/2" in text
        assert ("everything" in text) == (len(rows) > 3)


def test_the_figure_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure(ROWS, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_without_measures_it_is_lost_and_with_everything_it_learns() -> None:
    none = STUDY.run(StudyJob(key="a", args={"arm": "no measures", "seed": 1, "num_steps": 40}))
    assert math.isnan(none["held_out"])
    assert none["curve"][-1][0] < 40  # it was not trained on after that
    everything = STUDY.run(StudyJob(key="b", args={"arm": "everything", "seed": 0, "num_steps": 40}))
    assert everything["held_out"] < 3.4
    assert everything["curve"][0][1] == pytest.approx(math.log(256), rel=0.02)


def test_clipping_and_warm_up_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped, rates = [], []

    def trained(model: object, step: object, *, seed: int, num_steps: int) -> stability.StabilityRun:
        text = stability.TopicsText(context=32, batch_size=8, seed=seed)
        for _ in range(3):
            step(text.batch())  # type: ignore[operator]
        return stability.StabilityRun(held_out=0.0, curve=(), seconds=0.0)

    monkeypatch.setattr(stability, "_trained", trained)
    sgd = stability.torch.optim.SGD.step
    monkeypatch.setattr(
        stability.torch.optim.SGD,
        "step",
        lambda self, *args: (rates.append(self.param_groups[0]["lr"]), sgd(self, *args))[1],
    )
    norm = stability.torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        stability.torch.nn.utils, "clip_grad_norm_", lambda *args: (clipped.append(args[1]), norm(*args))[1]
    )
    stability.plain(0, num_steps=50, clip=False, warm=False)
    assert (clipped, rates) == ([], [0.5, 0.5, 0.5])
    rates.clear()
    stability.plain(0, num_steps=50, clip=True, warm=True)
    assert clipped == [1.0] * 3
    assert 0.0 <= rates[0] < rates[1] < rates[2] < 0.5
    assert rates[2] - rates[1] == pytest.approx(0.05)  # a tenth of the way each, over 10 steps
