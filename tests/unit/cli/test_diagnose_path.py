"""`steadystep diagnose PATH` as a person or a program meets it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from steadystep.cli.app import app
from steadystep.cli.diagnose import _rows
from steadystep.errors import ConfigError
from steadystep.runs.reading import PlannedAction

STEPS = np.arange(300)
HEALTHY = 2.0 + 3.0 * (1 + STEPS / 20) ** -0.5 + 0.03 * np.random.default_rng(0).standard_normal(300)


def log(path: Path, losses: np.ndarray, header: str = "step,loss") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(f"{i},{loss}" for i, loss in enumerate(losses))]) + "\n")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    losses = HEALTHY.copy()
    losses[200:] += np.minimum(np.arange(100) * 0.5, 6.0)
    return log(tmp_path / "bad.csv", losses)


def test_healthy_says_so_and_stops(tmp_path: Path) -> None:
    result = run(log(tmp_path / "good.csv", HEALTHY))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Healthy: loss 5")
    assert "▁" in lines[1]
    assert lines[2:] == ["read 300 rows: step=step, loss=loss"]


def test_trouble_comes_with_step_numbers_and_what_to_do(diverged: Path) -> None:
    result = run(diverged)
    assert result.exit_code == 1
    assert result.stdout.startswith("Problem: the run diverged from step 20")
    assert "1. divergence, step 20" in result.stdout
    assert "try: roll back to a checkpoint" in result.stdout
    assert "A guard would have intervened" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_program_reads_json(diverged: Path) -> None:
    result = run(diverged, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["healthy"] is False
    assert told["findings"][0]["kind"] == "divergence"
    assert told["findings"][0]["severity"] == "act"
    assert 199 <= told["findings"][0]["step"] <= 202
    assert set(told["plans"][0]) == {"step", "action", "reason"}
    assert "rollback" in told["plans"][0]["action"]


def test_json_has_no_nan_in_it(tmp_path: Path) -> None:
    losses = HEALTHY.copy()
    losses[250:] = math.nan
    told = json.loads(run(log(tmp_path / "a.csv", losses), "--json").stdout, parse_constant=pytest.fail)
    assert told["findings"][0]["kind"] == "non-finite"


def test_columns_are_named_on_the_command_line(tmp_path: Path) -> None:
    path = log(tmp_path / "a.csv", HEALTHY, header="tick,thing")
    assert run(path, "--column", "loss=thing", "--column", "step=tick").exit_code == 0
    for wrong in ("loss", "=x", "loss="):
        assert isinstance(run(path, "--column", wrong).exception, ConfigError)


def test_what_cannot_be_read_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    from steadystep.cli.app import main

    arguments, sys.argv = sys.argv, ["steadystep", "diagnose", str(tmp_path / "missing")]
    try:
        with pytest.raises(SystemExit) as stopped:
            main()
    finally:
        sys.argv = arguments
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_every_run_in_a_folder_gets_a_verdict(tmp_path: Path, diverged: Path) -> None:
    log(tmp_path / "good.csv", HEALTHY)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "good.csv" in result.stdout
    assert "Healthy" in result.stdout
    assert "Problem" in result.stdout
    assert len(json.loads(run(tmp_path, "--json").stdout)) == 2
    (tmp_path / "odd.csv").write_bytes(b"\x00\x00")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "odd.csv" in result.stderr
    assert "Healthy" in result.stdout


def test_names_in_a_log_cannot_steer_the_terminal(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{loss}" for i, loss in enumerate(HEALTHY))
    (tmp_path / "a.csv").write_text(f"step,loss[red]\x1b[2J\n{rows}\n")
    result = run(tmp_path / "a.csv", "--notes")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "[red]" in result.stdout


def test_notes_are_shown_when_asked_for(tmp_path: Path) -> None:
    losses = HEALTHY.copy()
    losses[150] += 1.0
    path = log(tmp_path / "a.csv", losses)
    assert "spikes-healed" not in run(path).stdout
    assert "spikes-healed, step 150" in run(path, "--notes").stdout
    assert run(path, "--notes").stdout.count("read 300 rows") == 1


def test_plans_of_one_kind_in_a_row_are_counted() -> None:
    plans = [PlannedAction(step, "skip-step", f"non-finite-loss: the loss is {step}") for step in range(100, 140)]
    rows = _rows([PlannedAction(50, "rescale", "exploding-gradient: x"), *plans])
    assert [len(row) for row in rows] == [1, 40]
    assert [row[0].step for row in rows] == [50, 100]


def test_what_cannot_be_judged_is_exit_code_0_with_the_sentence(tmp_path: Path) -> None:
    short = run(log(tmp_path / "short.csv", HEALTHY[:35]))
    assert (short.exit_code, short.stdout.splitlines()[0]) == (0, "Too short to tell: 35 steps.")
    told = json.loads(run(log(tmp_path / "short.csv", HEALTHY[:35]), "--json").stdout)
    assert (told["healthy"], told["outcome"], told["findings"]) == (None, "too-short", [])
    noise = run(log(tmp_path / "policy.csv", np.random.default_rng(0).standard_normal(300)))
    assert noise.exit_code == 0
    assert noise.stdout.startswith("No sign of trouble, learning not judged: a loss of both signs")


def test_a_run_that_learns_nothing_is_exit_code_1(tmp_path: Path) -> None:
    result = run(log(tmp_path / "flat.csv", 2.303 + 0.002 * np.random.default_rng(0).standard_normal(450)))
    assert result.exit_code == 1
    assert result.stdout.startswith("Not learning, cause unknown: loss 2.30")


def test_what_a_script_printed_is_read_and_the_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    lines = [f"[rank0]: step: {i} | lm loss: {loss:.5f} | grad norm: 1.{i}" for i, loss in enumerate(HEALTHY)]
    path.write_text("\n".join(["loading the data", *lines]))
    result = run(path)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[2] == "read 300 rows: step=step, loss=lm loss, grad_norm=grad norm"


def test_each_run_of_a_panel_gets_a_verdict(tmp_path: Path) -> None:
    bad = HEALTHY.copy()
    bad[200:] += np.minimum(np.arange(100) * 0.5, 6.0)
    rows = [f'"{i}","{a}","{a}","{a}","{b}"' for i, (a, b) in enumerate(zip(HEALTHY, bad, strict=True))]
    header = '"Step","fine-1 - train/loss","fine-1 - train/loss__MIN","fine-1 - train/loss__MAX","worse-2 - train/loss"'
    path = tmp_path / "panel.csv"
    path.write_text("\n".join([header, *rows]))
    result = run(path)
    assert result.exit_code == 1
    assert [line for line in result.stdout.splitlines() if str(path) in line] == [f"{path}: fine-1", f"{path}: worse-2"]
    told = json.loads(run(path, "--json").stdout)
    assert [(one["name"], one["outcome"]) for one in told] == [("fine-1", "healthy"), ("worse-2", "fault")]
