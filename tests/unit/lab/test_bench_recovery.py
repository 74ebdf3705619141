"""The recovery study: what is left of a run, and beside whom."""

import ast
import io
import json
import math
from pathlib import Path

import pytest
from benchmarks import oracle
from rich.console import Console

from steadystep.lab.bench import faulty_jobs as faulty
from steadystep.lab.bench import header
from steadystep.lab.bench import run as run_study
from steadystep.lab.bench.detection import STUDY as DETECTION
from steadystep.lab.bench.faulty_arms import Plain
from steadystep.lab.bench.faulty_jobs import Twins
from steadystep.lab.bench.faulty_run import TRIALS, Stopped, Tick, first_step, run
from steadystep.lab.bench.recovery import STUDY, summary, table
from steadystep.lab.bench.rival_rules import RULES
from steadystep.lab.bench.study import Choice
from tests.unit.lab.bench_rows import row, twins

NAN = math.nan


@pytest.fixture(autouse=True)
def _no_rivals_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)


def study_rows() -> list[dict]:
    rows = []
    for seed in (0, 1):
        rows += twins(seed=seed)
        rows += [
            row("unguarded", 2.0, trial="flipped bit", seed=seed),
            row("unguarded", NAN, trial="NaN loss, five", seed=seed),
            row("unguarded", 1.0, trial="gradients x10", seed=seed),
            row("autopilot", 1.02, trial="flipped bit", seed=seed, lost=40, did={"rollback": 1}, acted=205),
            row("autopilot", 1.0, trial="NaN loss, five", seed=seed, lost=5, did={"skip-step": 5}, acted=200),
            row("autopilot", 1.2, trial="gradients x10", seed=seed, lost=9, did={"rollback": 1}, acted=203),
            row("careful", 1.5, trial="flipped bit", seed=seed),
            row("careful", 1.0, trial="NaN loss, five", seed=seed, lost=5),
        ]
    return [
        *rows,
        row("ZClip", 1.9, trial="flipped bit"),
        row("ZClip", NAN, trial="NaN loss, five", finite=False),
        row("ZClip", 0.9),
        row("SpikeDetection", NAN, trial="flipped bit", finite=True, stopped="the rule ends the run"),
        row("SpikeDetection", NAN, trial="NaN loss, five", finite=True, stopped="crashed: ValueError"),
        row("SpikeDetection", 1.0, trial="flipped bit", seed=1),
    ]


def test_every_arm_on_the_runs_that_were_harmed() -> None:
    told = summary(study_rows())
    guard = {line["arm"]: line for line in told["guard"]}
    assert (guard["autopilot"]["runs"], guard["autopilot"]["within"], guard["autopilot"]["within_1_percent"]) == (
        4,
        4,
        2,
    )
    assert (guard["autopilot"]["median_lost"], guard["careful"]["within"]) == (5.0, 2)
    assert told["arm_seeds"] == [0]  # the rules were run on one seed, so everybody is compared on that one
    arms = {line["arm"]: line for line in told["arms"]}
    assert {line["runs"] for line in told["arms"]} == {2}
    assert (arms["ZClip"]["within"], arms["ZClip"]["lost_to_nan"], arms["ZClip"]["without_a_fault"]) == (0, 1, 0.9)
    assert (arms["SpikeDetection"]["stopped"], arms["SpikeDetection"]["crashed"]) == (1, 1)
    assert arms["unguarded"]["within"] == 0


def test_a_run_that_lost_steps_is_also_compared_with_its_twin_that_many_steps_ago() -> None:
    curve = {str(step): 1.0 + (479 - step) / 100 for step in range(199, 480, 10)}
    made = Twins([row("clean", 1.2, curve=curve), row("missing-0", 1.2)])
    assert not made.fine(row("autopilot", 1.3, lost=0))
    assert not made.fine_but_for_lost(row("autopilot", 1.3, lost=0))
    assert made.fine_but_for_lost(row("autopilot", 1.3, lost=20))  # the twin was at 1.4 then
    assert not made.fine_but_for_lost(row("autopilot", 1.5, lost=20))
    assert not made.fine_but_for_lost(row("autopilot", NAN, lost=20))
    assert not made.fine_but_for_lost(row("autopilot", 1.3, lost=400))  # nobody looked so early


def test_faults_and_what_was_done_where_nothing_would_have_happened() -> None:
    told = summary(study_rows())
    faults = {line["fault"]: line for line in told["faults"]}
    assert list(faults) == ["flipped bit", "NaN loss, five"]
    assert faults["flipped bit"]["careful_within"] == 0
    assert faults["flipped bit"]["did"] == {"rollback": 2}
    (harmless,) = told["harmless"]
    assert (harmless["fault"], harmless["acted"], harmless["harmed"]) == ("gradients x10", 2, 2)


def test_rivals_are_shown_when_there_are_rows_of_the_same_runs(tmp_path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    mine = row("zclip 1.0.0", 1.0, trial="flipped bit")
    other = row("zclip 1.0.0", 1.0, trial="flipped bit", seed=77)
    lines = [{"header": {}}, {"key": "a", "row": mine}, {"key": "b", "row": other}]
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"key": "c", "ro'
    (folder / "rivals.jsonl").write_text(text)
    assert len(header.stored_rows()) == 2
    arms = {line["arm"]: line for line in summary(study_rows())["arms"]}
    assert (arms["zclip 1.0.0"]["runs"], arms["zclip 1.0.0"]["within"]) == (1, 1)
    assert header.stored_rows("nothing") == []


def test_both_studies_depend_on_the_same_code() -> None:
    assert header.code(STUDY) == header.code(DETECTION)


def test_jobs_give_each_arm_what_it_can_do() -> None:
    jobs = STUDY.jobs(Choice())
    assert len({job.key for job in jobs}) == len(jobs)
    assert {job.args["arm"] for job in jobs} >= {"unguarded", "careful", "autopilot"} | set(faulty.RULE_ARMS)
    assert "KillLossSpike" not in faulty.RULE_ARMS  # it only writes to a log
    assert not [job for job in jobs if job.args["arm"] == "SPAM" and job.args["task"] == "clusters"]
    assert {job.args["arm"] for job in jobs if job.args["precision"] == "fp16"} == {
        "clean",
        "unguarded",
        "careful",
        "autopilot",
    }
    assert {job.args["seed"] for job in jobs if job.args["arm"] in RULES} == {faulty.JUDGE_SEEDS[0]}
    assert len(STUDY.jobs(Choice(quick=True))) < 25


def scope(trial: str) -> faulty.Scope:
    return faulty.Scope(seeds=(0,), trials=(TRIALS[trial],), tasks=("clusters",), shorter=220)


def test_the_guard_brings_a_run_through_and_a_clip_does_not() -> None:
    made = {arm: faulty.make(faulty.broken(scope("NaN in a gradient"), arm)[0]) for arm in ("autopilot", "clip 1.0")}
    assert made["autopilot"]["did"] == {"skip-step": 1}
    assert (made["autopilot"]["lost"], made["autopilot"]["lr"], made["autopilot"]["stopped"]) == (1, 1.0, "")
    assert 0.3 < made["autopilot"]["score"] < 0.7
    assert not made["clip 1.0"]["finite"]
    assert math.isnan(made["clip 1.0"]["score"])


def test_the_rate_of_the_last_update_is_told() -> None:
    made = faulty.make(faulty.broken(scope("LR x30 for good"), "SpikeDetection")[0])
    assert made["lr"] == pytest.approx(30.0)


class Ending:
    """A trainer that ends by design, or breaks down."""

    def __init__(self, task, error: Exception) -> None:
        self.model, self.optimizer, self.updates, self._error = task.model, task.optimizer, 0, error

    def step(self, work, batch) -> Tick:
        raise self._error

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "told"), [(Stopped("halted: x"), "halted: x"), (ValueError("y"), "crashed: ValueError: y")]
)
def test_an_arm_that_ends_early_says_how(error: Exception, told: str) -> None:
    made = run(lambda task: Ending(task, error), task="clusters", seed=0, num_steps=5)
    assert (made["stopped"], made["finite"]) == (told, True)
    assert math.isnan(made["score"])


def test_table_and_figure(tmp_path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(study_rows()))
    text = console.export_text()
    assert "All methods on the same runs (seeds 0)" in text
    assert "100.0 %" in text
    assert "what autopilot did" in text
    pytest.importorskip("matplotlib")
    assert STUDY.figure is not None
    STUDY.figure(study_rows(), tmp_path / "recovery.png")
    assert (tmp_path / "recovery.png").stat().st_size > 5000


@pytest.mark.slow
def test_recovery_goes_on_with_the_rows_of_detection(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "code", lambda study: "the same")  # whoever edits a file meanwhile
    made: dict[str, int] = {"detection": 0, "recovery": 0}

    def watch(name: str):
        def count(done: int, total: int, last: object) -> None:
            made[name] = total

        return count

    choice = Choice(quick=True)
    first = run_study(DETECTION, choice, out=tmp_path, num_workers=1, watch=watch("detection"))
    second = run_study(STUDY, choice, out=tmp_path, num_workers=1, watch=watch("recovery"))
    assert not first.failed
    assert not second.failed
    assert made["detection"] == first.total == len(DETECTION.jobs(choice))
    assert made["recovery"] == second.total - sum(row["kind"] == "run" for row in first.rows)
    assert summary(second.rows)["guard"][0]["within"] >= 2


def possible(score: float, *, destroyed: int = 0, more: int | None = None, seed: int = 0) -> dict:
    same = {"kind": "oracle", "task": "clusters", "seed": seed, "num_steps": 480, "precision": "fp32"}
    return same | {"destroyed": destroyed, "more": more, "score": score}


def test_runs_are_also_compared_with_what_was_possible_without_the_destroyed_batches() -> None:
    rows = [*study_rows(), row("unguarded", 2.0, trial="sign flipped for 20")]
    rows.append(row("autopilot", 1.13, trial="sign flipped for 20", lost=20))
    told = summary(rows, [possible(1.0), possible(1.1, destroyed=20), possible(1.12, destroyed=20, more=50)])
    (line,) = (line for line in told["faults"] if line["fault"] == "sign flipped for 20")
    assert (line["within"], line["within_oracle"], line["oracle_runs"]) == (0, 0, 1)  # 1.13 / 1.1 is above 1.12 / 1.1
    wider = [possible(1.0), possible(1.1, destroyed=20), possible(1.14, destroyed=20, more=50)]
    (line,) = (line for line in summary(rows, wider)["faults"] if line["fault"] == "sign flipped for 20")
    assert (line["within"], line["within_oracle"]) == (0, 1)


def test_a_run_that_ends_as_if_nothing_had_happened_is_within_the_oracle() -> None:
    """Without the destroyed batches the plain run happened to end better: that is chance."""
    rows = [*twins(), row("unguarded", 2.0, trial="sign flipped for 20")]
    rows.append(row("autopilot", 1.0, trial="sign flipped for 20"))
    told = summary(rows, [possible(1.0), possible(0.9, destroyed=20)])
    assert told["faults"][0]["within_oracle"] == 1
    assert (told["oracle"]["clean_runs"], told["oracle"]["identical"]) == (1, 1)
    assert summary(rows, [possible(1.0 + 1e-9)])["oracle"] == {
        "limits": {"clusters": 1.01},
        "clean_runs": 1,
        "identical": 0,
    }


def test_seeds_without_an_oracle_are_not_counted() -> None:
    told = summary(study_rows(), [possible(1.0, seed=1), possible(1.0, destroyed=5, seed=1)])
    (line,) = (line for line in told["guard"] if line["arm"] == "autopilot")
    assert (line["runs"], line["oracle_runs"], line["within_oracle"]) == (4, 2, 2)
    text = io.StringIO()
    Console(file=text, width=250).print(table(study_rows()))  # nobody has run it here
    assert "oracle.py" not in text.getvalue()


def test_what_the_oracle_goes_without() -> None:
    destroyed = {name: trial.destroyed for name, trial in TRIALS.items()}
    assert destroyed["labels shuffled for 20"] == destroyed["no zero_grad for 20"] == 20
    assert destroyed["NaN loss, five"] == 5
    assert destroyed["gradients x1e4"] == destroyed["NaN in the input"] == 1
    lost = ("LR x100 for 20", "flipped bit", "gradients x10 for good", "frozen layer", "loss drifts", "moments x1000")
    assert {destroyed[name] for name in lost} == {0}
    assert set(destroyed.values()) == set(oracle.DESTROYED)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[pytest.mark.slow] if task in ("gpt", "rnn") else []) for task in oracle.TASKS]
)
def test_the_oracle_is_a_plain_program_that_trains_the_same_runs(task: str) -> None:
    assert oracle.first_step(7) == first_step(7)
    mine = run(Plain, task=task, seed=7, num_steps=41, without=(3,))
    assert oracle.score(oracle.TASKS[task](7), num_steps=41, without=(3,)) == mine["score"]


def test_the_oracle_imports_nothing_of_the_library() -> None:
    source = Path(oracle.__file__).read_text()
    imported = [node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    imported += [
        name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for name in node.names
    ]
    assert not [name for name in imported if name.startswith(("steadystep", "tests", "benchmarks"))]


@pytest.mark.parametrize(
    ("noticed", "said", "is_named"),
    [
        (262, "vanishing-gradient: zero-gradient", 1),
        (400, "zero-gradient: zero-gradient", 1),
        (401, "zero-gradient: zero-gradient", 0),
        (262, "slow-divergence: learning-rate-too-high", 0),
        (None, "", 0),
    ],
)
def test_a_frozen_layer_is_to_be_named(noticed: int | None, said: str, is_named: int) -> None:
    rows = [*twins(), row("unguarded", 2.0, trial="frozen layer"), row("unguarded", 2.0, trial="flipped bit")]
    rows.append(row("autopilot", 1.5, trial="frozen layer", noticed=noticed, said=said))
    rows.append(row("autopilot", 1.0, trial="flipped bit", noticed=200, said="weight-jump: zero-gradient"))
    (line,) = (line for line in summary(rows, [possible(1.0)])["guard"] if line["arm"] == "autopilot")
    assert (line["named"], line["to_name"]) == (is_named, 1)
    assert (line["within_oracle"], line["oracle_runs"]) == (1, 2)
    assert (line["within_reachable"], line["reachable_runs"]) == (1, 1)


def test_rows_of_single_seeds_are_in_folders_of_their_own(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "seed811"):
        folder.mkdir(exist_ok=True)
        (folder / "rivals.jsonl").write_text(json.dumps({"row": {"seed": folder.name}}) + "\n")
    assert [each["seed"] for each in header.stored_rows(folder=tmp_path)] == [tmp_path.name, "seed811"]
