"""The frame of `steadystep bench`: jobs on processes, rows on disk, nothing made twice, nothing mixed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from typer.testing import CliRunner

from steadystep.cli.app import app
from steadystep.errors import ConfigError
from steadystep.lab import bench
from steadystep.lab.bench import STUDIES, Choice, Row, Store, Study, StudyJob, load, run, stored
from steadystep.lab.bench.header import Header, code, commit
from steadystep.lab.bench.study import each, parse_seeds


def squares(choice: Choice) -> list[StudyJob]:
    return [StudyJob(key=f"square/{n}", args={"n": n}) for n in choice.pick(full=range(4), quick=range(2))]


def square(job: StudyJob) -> Row:
    n = job.args["n"]
    if n == 13:
        raise ValueError("thirteen is unlucky")
    if n == 66:
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 99:
        time.sleep(600)
    return {"square": n * n}


def total(rows: Sequence[Row]) -> dict[str, object]:
    return {"total": sum(row["square"] for row in rows), "seen": [row["n"] for row in rows]}


def table(rows: Sequence[Row]) -> Text:
    return Text(f"the total is {sum(row['square'] for row in rows)}")


def draw(rows: Sequence[Row], path: Path) -> None:
    path.write_text("drawn")


SQUARES = Study(name="squares", about="", jobs=squares, run=square, table=table, summary=total, figure=draw)


def made_by(study: Study, choice: Choice, out: Path, **more: object) -> list[str]:
    keys: list[str] = []
    run(study, choice, out=out, num_workers=1, watch=lambda m, t, d: keys.append(d.job.key) if d else None, **more)
    return keys


def test_rows_are_stored_with_arguments_under_a_header(tmp_path: Path) -> None:
    results = run(SQUARES, Choice(), out=tmp_path, num_workers=1)
    assert [row["square"] for row in results.rows] == [0, 1, 4, 9]
    lines = [json.loads(line) for line in (tmp_path / "squares.jsonl").read_text().splitlines()]
    assert lines[0]["header"].keys() >= {"command", "commit", "python", "torch", "steadystep", "cpus", "date", "code"}
    assert lines[2] == {"key": "square/1", "row": {"n": 1, "square": 1}}


def test_quick_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert len(run(SQUARES, Choice(quick=True), out=tmp_path, num_workers=1).rows) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["squares-quick.jsonl"]


def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "squares.jsonl"
    assert len(made_by(SQUARES, Choice(), tmp_path)) == 4
    assert made_by(SQUARES, Choice(), tmp_path) == []
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:9])  # the machine went down in the middle of a line
    assert made_by(SQUARES, Choice(), tmp_path) == ["square/2", "square/3"]
    assert made_by(SQUARES, Choice(), tmp_path) == []


def test_other_settings_and_other_code_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(SQUARES, Choice(), out=tmp_path, num_workers=1)
    with pytest.raises(ConfigError, match=r"seeds.*--fresh"):
        run(SQUARES, Choice(seeds=(7,)), out=tmp_path, num_workers=1)
    with monkeypatch.context() as patch:
        patch.setattr("steadystep.lab.bench.header.code", lambda study: "other")
        with pytest.raises(ConfigError, match=r"different code \(commit"):
            run(SQUARES, Choice(), out=tmp_path, num_workers=1)
    assert len(Store.read(tmp_path / "squares.jsonl").rows) == 4  # refused, not harmed
    assert run(SQUARES, Choice(seeds=(7,)), out=tmp_path, num_workers=1, fresh=True).rows == ({"n": 7, "square": 49},)


def test_a_commit_that_changes_no_code_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(SQUARES, Choice(), out=tmp_path, num_workers=1)
    monkeypatch.setattr("steadystep.lab.bench.header.commit", lambda: "abc1234")
    assert made_by(SQUARES, Choice(), tmp_path) == []


def test_the_digest_knows_the_study_and_its_parts() -> None:
    named = replace(SQUARES, name="stability")
    assert len({code(SQUARES), code(named), code(replace(SQUARES, parts=("precision",)))}) == 3


def test_the_commit_is_that_of_our_own_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    ours, installed = tmp_path / "src" / "steadystep", tmp_path / ".venv" / "steadystep"
    for package in (ours, installed):
        package.mkdir(parents=True)
        (package / "a.py").write_text("a = 1\n")

    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("add", "src")
    git("commit", "-m", "first")
    monkeypatch.setattr("steadystep.lab.bench.header._PACKAGE", ours)
    clean = commit()
    assert len(clean) >= 7
    (ours / "a.py").write_text("a = 2\n")
    assert commit() == f"{clean}+"
    monkeypatch.setattr("steadystep.lab.bench.header._PACKAGE", installed)
    assert commit() == ""


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "squares.jsonl").write_text('{"key": "a", "row": {}}\n')
    with pytest.raises(ConfigError, match="not a results file"):
        run(SQUARES, Choice(), out=tmp_path, num_workers=1)


def test_a_job_that_fails_costs_only_itself_and_is_tried_again(tmp_path: Path) -> None:
    results = run(SQUARES, Choice(seeds=(2, 13, 3)), out=tmp_path, num_workers=1)
    assert [row["n"] for row in results.rows] == [2, 3]
    assert results.total == 3
    assert [done.job.key for done in results.failed] == ["square/13"]
    assert "thirteen is unlucky" in results.failed[0].error
    assert made_by(SQUARES, Choice(seeds=(2, 13, 3)), tmp_path) == ["square/13"]


@pytest.mark.slow
def test_processes_share_the_jobs_and_a_dead_one_is_replaced() -> None:
    jobs = squares(Choice(seeds=(5, 66, 13, 6, 7)))
    done = {d.job.args["n"]: d for d in each(square, jobs, num_workers=2)}
    assert {n: d.row and d.row["square"] for n, d in done.items()} == {5: 25, 66: None, 13: None, 6: 36, 7: 49}
    assert "exit code -9" in done[66].error
    assert "thirteen" in done[13].error


def follow(choice: Choice, rows: Sequence[Row]) -> list[StudyJob]:
    """Every square below 300 is squared as well."""
    return [
        StudyJob(key=f"square/{row['square']}", args={"n": row["square"]}) for row in rows if 1 < row["square"] < 300
    ]


def test_jobs_that_follow_from_rows(tmp_path: Path) -> None:
    chain = replace(SQUARES, then=follow)
    results = run(chain, Choice(seeds=(2,)), out=tmp_path, num_workers=1)
    assert [row["n"] for row in results.rows] == [2, 4, 16, 256]
    assert made_by(chain, Choice(seeds=(2,)), tmp_path) == []
    lines = (tmp_path / "squares.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "squares.jsonl").write_text("".join(lines[:3]))
    assert [row["n"] for row in stored(chain, Choice(), out=tmp_path).rows] == [2, 4]
    assert made_by(chain, Choice(seeds=(2,)), tmp_path) == ["square/16", "square/256"]


def test_what_measures_time_runs_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="omit --jobs"):
        run(replace(SQUARES, alone=True), Choice(), out=tmp_path, num_workers=2)
    assert len(run(replace(SQUARES, alone=True), Choice(), out=tmp_path).rows) == 4


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), min_size=1, max_size=6))
def test_seeds_read_back(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{a}-{a + more}" if more else str(a) for a, more in ranges)
    wanted = [seed for a, more in ranges for seed in range(a, a + more + 1)]
    assert list(parse_seeds(text)) == sorted(set(wanted), key=wanted.index)


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "1.5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)


def test_the_header_reads_back() -> None:
    header = Header.now(SQUARES, Choice(quick=True, seeds=(1, 2)))
    assert Header.read(json.loads(json.dumps(header.as_dict()))) == header
    assert header.differences(header) == []
    assert header.differences(replace(header, torch="1.0", date="1999-01-01")) == [
        f"torch {header.torch} stored, 1.0 here"
    ]


def test_every_study_is_where_it_is_said_to_be() -> None:
    for name in STUDIES:
        study = load(name)
        assert study.name == name
        for quick in (True, False):
            jobs = study.jobs(Choice(quick=quick))
            assert len({job.key for job in jobs}) == len(jobs) > 0
            assert json.loads(json.dumps([dict(job.args) for job in jobs])) == [dict(job.args) for job in jobs]


@pytest.fixture
def squares_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setitem(STUDIES, "squares", "tests.unit.lab.test_bench_frame:SQUARES")
    return ["bench", "squares", "--jobs", "1", "--out", str(tmp_path)]


def test_the_verb_shows_a_table_and_its_origin(squares_verb: list[str], tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    told = CliRunner().invoke(app, [*squares_verb, "--figure", str(figure)])
    assert told.exit_code == 0
    assert "the total is 14" in told.output
    assert "torch" in told.output
    assert figure.read_text() == "drawn"
    again = CliRunner().invoke(app, [*squares_verb, "--table", "--json"])
    found = json.loads(again.stdout)
    assert (found["summary"], found["runs"], found["total"]) == ({"total": 14, "seen": [0, 1, 2, 3]}, 4, 4)


def test_a_wide_table_is_whole_in_a_file(squares_verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = replace(SQUARES, table=lambda rows: Text("x" * 150))
    monkeypatch.setattr(bench, "load", lambda what: wide)
    told = CliRunner().invoke(app, squares_verb)
    assert told.exit_code == 0, told.output
    assert "x" * 150 in told.stdout


def test_a_table_of_a_stopped_study_says_so(squares_verb: list[str], tmp_path: Path) -> None:
    run(SQUARES, Choice(), out=tmp_path, num_workers=1)
    lines = (tmp_path / "squares.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "squares.jsonl").write_text("".join(lines[:3]))
    told = CliRunner().invoke(app, [*squares_verb, "--table"])
    assert "2 of 4 runs so far" in told.output
    assert "the total is 1" in told.output


def test_failed_runs_give_exit_code_1(squares_verb: list[str]) -> None:
    told = CliRunner().invoke(app, [*squares_verb, "--seeds", "2,13"])
    assert told.exit_code == 1
    assert "square/13" in told.output


def test_mistakes_are_named(squares_verb: list[str], tmp_path: Path) -> None:
    def mistake(*words: str) -> str:
        return str(CliRunner().invoke(app, [*words]).exception)

    assert "did you mean 'stability'" in mistake("bench", "stabilty")
    assert "--seeds 'x'" in mistake(*squares_verb, "--seeds", "x")
    assert "contains no results yet" in mistake(*squares_verb, "--table")
    assert ".svg" in mistake(*squares_verb, "--figure", "a.txt")
    assert "no folder" in mistake(*squares_verb, "--figure", str(tmp_path / "no" / "a.png"))
    assert "not built" in mistake(*_missing_study())


def _missing_study() -> list[str]:
    bench.STUDIES["squares"] = "steadystep.lab.bench.nowhere:STUDY"  # the fixture puts it back
    return ["bench", "squares"]


_STOPPED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
from steadystep.cli.app import main
from steadystep.lab.bench import STUDIES
STUDIES["squares"] = "tests.unit.lab.test_bench_frame:SQUARES"
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_has_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_STOPPED)
    command = [sys.executable, "program.py", "bench", "squares", "--seeds", "3,99", "--jobs", "2", "--out", "."]
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=where, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    file = tmp_path / "squares.jsonl"
    while process.poll() is None and not (file.exists() and file.read_text().count("\n") == 2):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues from there" in said
    assert "Traceback" not in said
    assert [row["n"] for row in Store.read(file).rows.values()] == [3]
