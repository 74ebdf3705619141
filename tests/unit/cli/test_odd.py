"""Files and terminals that are not as one would wish."""

import io
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from steadystep.errors import ConfigError
from steadystep.lab.bench import Store
from steadystep.lab.bench.study import parse_seeds
from steadystep.lint.configs import check_config
from steadystep.lint.runs import check_run
from steadystep.runs.csv_and_databases import _kept
from steadystep.runs.open import open_run
from tests.unit.pages.report_runs import made_run, steadystep, write_log

FAULTY = """import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in data:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""


def test_a_terminal_without_utf8_gets_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "r\u2603n", made_run(60))
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    assert steadystep("report", str(tmp_path / "r\u2603n")) == 0
    out.flush()
    assert b"r?n" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_one_broken_script_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("def f(:\n")
    (tmp_path / "b.py").write_text(FAULTY)
    (tmp_path / "c.py").write_bytes(b"\xff\xfe")
    assert steadystep("check", str(tmp_path)) == 1
    told = capsys.readouterr()
    assert "b.py" in told.out
    assert "a.py:1" in told.err
    assert "c.py" in told.err
    (tmp_path / "b.py").write_text("a = 1\n")
    assert steadystep("check", str(tmp_path)) == 2


@pytest.mark.parametrize("text", ["a: &a\n  b: *a\n", "training: &a\n  b: *a\n", "a: " + "[" * 600 + "]" * 600])
def test_a_config_that_contains_itself_is_a_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with suppress(ConfigError):
        assert check_config(tmp_path / "a.yaml").hits


def test_aliases_of_aliases_take_no_time(tmp_path: Path) -> None:
    lines = [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 60)]
    (tmp_path / "a.yaml").write_text("\n".join(["a0: &a0 {x: 1}", *lines]))
    assert check_config(tmp_path / "a.yaml").hits


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'{"header": "x"}\n', b'{"header": [1]}\n', b"[" * 100_000])
def test_a_results_file_of_somebody_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="not a results file"):
        Store.read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("text", ["0-999999999999", "1-" + "9" * 5000, "0-9000,0-9000"])
def test_more_seeds_than_anybody_wants(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)


def test_very_many_columns_are_looked_at_once_each() -> None:
    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = str.__hash__

        def rsplit(self, *_: object) -> "list[Counted]":  # type: ignore[override]
            return [self]

    names = [Counted(f"column {i}") for i in range(2000)]
    assert _kept(names) == names  # type: ignore[arg-type]
    assert Counted.compared < 20_000
    assert _kept(["a - loss", "a - loss__MIN", "b - loss", "step", "step", ""]) == [
        "a - loss",
        None,
        "b - loss",
        "step",
        None,
        None,
    ]


def test_the_best_accuracy_is_the_highest(tmp_path: Path) -> None:
    with write_log(tmp_path, made_run(40)).open("a") as log:
        log.write("".join(f'{{"kind":"validation","step":{s},"metrics":{{"accuracy":{s / 50}}}}}\n' for s in (10, 20)))
    text = (tmp_path / "run.jsonl").read_text()
    (tmp_path / "run.jsonl").write_text("".join(li for li in text.splitlines(True) if "val_loss" not in li))
    said = next(item.evidence for item in check_run(tmp_path).items if item.name == "validation")
    assert "best 0.4 at step 20" in said


@pytest.mark.parametrize("verb", ["diagnose", "report", "check"])
def test_an_empty_log_is_exit_code_2(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text("")
    assert steadystep(verb, str(tmp_path)) == 2
    assert "the log is empty" in capsys.readouterr().err
    assert steadystep(verb, str(tmp_path / "run.jsonl")) == 2
    assert not (tmp_path / "report.html").exists()


def test_columns_can_be_named_for_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("it,foo\n" + "".join(f"{i},{5 - i / 20}\n" for i in range(60)))
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    with pytest.raises(ConfigError, match="--column"):
        open_run(files[0])
    assert steadystep("report", files[0], "--column", "loss=foo") == 0
    assert steadystep("compare", *files, "--column", "loss=foo") == 0
    assert steadystep("report", files[0], "--column", "foo") == 2
    assert "ROLE=NAME" in capsys.readouterr().err
