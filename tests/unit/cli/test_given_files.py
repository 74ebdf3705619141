"""Files that are not what they should be, given to the command line: one clear line, no traceback, no hang."""

import cProfile
import os
import random
import sys
import warnings
from pathlib import Path

import pytest

import steadystep
from steadystep._utils.text import quiet_log
from steadystep.cli.app import told
from steadystep.lint import check_script

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "attacks"))
import files
from file_damage import odd_paths
from file_samples import make_samples
from table import Rows


def error_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that is given something else than it wants: one line."""
    try:
        assert files.app(command, standalone_mode=False) == 2
        said = capsys.readouterr().err
    except steadystep.SteadystepError as error:
        said = told(error)
    assert said.startswith("error: ")
    assert said.strip().count("\n") == 0
    assert len(said) < 700
    return said


@pytest.mark.parametrize("verb", ["check", "train", "diagnose", "report"])
def test_what_has_no_end_is_refused(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        assert "not a" in error_of([verb, path], capsys)


@pytest.mark.parametrize("verb", ["check", "train", "diagnose", "report"])
def test_a_name_that_no_file_can_have(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "too long" in error_of([verb, "n" * 300 + ".yaml"], capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: " + "9" * 5000, "cannot parse a value"),
        ("seed: " + "[" * 5000, "nested too deeply"),
        ("seed: 2026-02-31", "cannot parse a value"),
        ("task: ../x:make", "package.module:factory"),
        ("task: .x:make", "package.module:factory"),
        ("task: " + "n" * 9000, "is not built in"),
        ("task: \x1b[2J", "YAML"),
    ],
    ids=lambda text: text[:16],
)
def test_settings_that_cannot_be(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert said in error_of(["train", str(tmp_path / "a.yaml"), "--run-dir", str(tmp_path / "out")], capsys)


def test_a_deep_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "incident.json").write_text("[" * 50_000)
    assert "nested too deeply" in error_of(["replay", str(tmp_path), "--factory", "os:getcwd"], capsys)


def test_errors_are_short_and_a_terminal_can_show_them() -> None:
    error = steadystep.ConfigError("\n".join([f"\x1b[2J{'n' * 5000}: give another", *["again"] * 50]))
    lines = told(error).splitlines()
    assert len(lines) == 21
    assert len(lines[0]) < 650
    assert lines[0].endswith("give another")
    assert lines[-1] == "and 31 more"
    assert "\x1b" not in told(error)


def calls_to_check(copies: int) -> int:
    part = (Path(__file__).parents[2] / "data" / "lint" / "develop").rglob("*.py")
    text = "\n".join(path.read_text() for path in sorted(part)[:2])
    many = "\n\n".join(
        text.replace("def ", f"def f{i}_").replace("model", f"model{i}").replace("class ", f"class C{i}_")
        for i in range(copies)
    )
    profile = cProfile.Profile()
    profile.runcall(check_script, many)
    return sum(entry.callcount for entry in profile.getstats())  # type: ignore[attr-defined]


def test_checking_a_script_takes_as_long_as_it_is() -> None:
    assert calls_to_check(12) < 6 * calls_to_check(3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
def test_damaged_files(seed: int, tmp_path: Path) -> None:
    rng, rows = random.Random(seed), Rows(progress=False)
    with quiet_log(), warnings.catch_warnings(action="ignore"):
        samples = make_samples(tmp_path / "samples", seed, files.answer)
        for number in range(130):
            files.attack(samples[number % len(samples)], rng, tmp_path / "case", rows, number)
    assert [row for row in rows.rows if not row.passed] == []


def test_the_attack_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object, **__: object) -> None:
        raise KeyError("step")

    monkeypatch.setattr(files, "app", raising)
    assert "KeyError" in files.answer(["check", "x"])
    assert "control" in files._wrong(0, "\x1b[2J", "")
    assert "without a word" in files._wrong(2, "", "")


def test_every_odd_path_has_a_command(tmp_path: Path) -> None:
    assert len(list(odd_paths(tmp_path / "odd"))) == 72
