"""What a notebook needs: short and escaped reprs, a cell that can be run twice, each line once, tables from logs."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import steadystep
from steadystep import ConfigError, Diagnosis, Guard, MisuseError, Outcome
from steadystep.records import Incident
from steadystep.runs import compare, open_run
from steadystep.tracking import StepRow, Terminal
from steadystep.tracking.display import DisplayedProgress
from steadystep.tracking.terminal import notebook_chart
from tests.unit.pages.report_runs import made_run

QUIET: dict[str, Any] = {"monitoring": {"sinks": []}}


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))


def train(guard: Guard, model: nn.Module, steps: int = 3, *, bad: tuple[int, ...] = ()) -> Outcome:
    for step in range(steps):
        x = torch.full((4, 2), float("nan") if step in bad else 1.0)
        outcome = guard.step(lambda x: model(x).square().mean(), batch=x)
    return outcome


def test_reprs_are_short_and_their_html_is_escaped(tmp_path: Path) -> None:
    model, optimizer = parts()
    with Guard(model, optimizer, config=QUIET, run_dir=tmp_path / "<i>") as guard:
        outcome = train(guard, model, bad=(2,))
        found = Diagnosis(cause="a<i>b", evidence="c")
        assert repr(guard).startswith("Guard(mode autopilot, optimizer AdamW, steps 3, applied 2, run_dir")
        assert repr(outcome) == "Outcome(step 2: loss nan, not applied, skip-step [non-finite-input])"
        assert repr(found) == "Diagnosis(a<i>b: c)"
        pages = [guard._repr_html_(), outcome._repr_html_(), found._repr_html_()]
    assert all("<i>" not in page for page in pages)
    assert [page.count("&lt;i&gt;") for page in pages] == [1, 1, 1]  # the folder, the bundle in it, the cause
    run = made_run(name="<i>run</i>")
    assert repr(run).startswith("Run('<i>run</i>': steps 3,000, final loss 1.999, best validation 2.055")
    assert len(repr(run)) < 200
    assert "&lt;i&gt;run" in run._repr_html_()
    assert "<i>" not in run._repr_html_()


def test_a_cell_that_makes_a_guard_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = parts()
    first = Guard(model, optimizer, config=QUIET, run_dir=tmp_path)
    with pytest.raises(MisuseError, match="already has a guard"):  # a program has no cells
        Guard(model, optimizer, config=QUIET)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with caplog.at_level(logging.WARNING, "steadystep"):
        second = Guard(model, optimizer, config=QUIET, run_dir=tmp_path)
    assert "the earlier guard of this run_dir is closed; the new one replaces it" in caplog.text
    with pytest.raises(MisuseError, match="closed"):
        train(first, model)
    train(second, model)
    third = Guard(*parts(), config=QUIET, run_dir=tmp_path)  # the cell of the model was run again too
    assert open_run(tmp_path).ended is False, "the end of the earlier guard came before the start of this one"
    watcher = steadystep.watch(model, optimizer, config=QUIET)
    again = steadystep.watch(model, optimizer, config=QUIET)
    assert not watcher._handles
    again.remove()
    third.close()


def test_the_screen_has_each_incident_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = parts()
    screen = io.StringIO()
    with (
        caplog.at_level(logging.INFO, "steadystep"),
        Guard(model, optimizer, config=QUIET, sinks=[Terminal(Console(file=screen, width=100))]) as guard,
    ):
        train(guard, model, bad=(2,))
    assert screen.getvalue().count("step 2: non-finite-input") == 1
    levels = [record.levelname for record in caplog.records if "step 2:" in record.getMessage()]
    assert levels == ["INFO"]  # a handler of yours can have it; the screen does not


def test_a_line_leaves_the_bar_of_tqdm_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    from steadystep._utils.text import logger

    handler = logging.StreamHandler(sys.stderr)
    logger.logger.addHandler(handler)
    try:
        for _ in tqdm(range(2), file=sys.stderr, ncols=40, mininterval=0.0):
            logger.warning("a line")
    finally:
        logger.logger.removeHandler(handler)
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().err.split("\n")]
    assert lines[:2] == ["steadystep: a line"] * 2  # not behind a bar
    assert "2/2" in lines[2]


def test_a_run_as_a_table(tmp_path: Path) -> None:
    model, optimizer = parts()
    with Guard(model, optimizer, config=QUIET, run_dir=tmp_path) as guard:
        train(guard, model, 5, bad=(3,))
        guard.validate(0.5, accuracy=0.25)
    table = steadystep.read_run(tmp_path).to_pandas()
    assert table.index.name == "step"
    assert list(table.columns) == ["loss", "grad_norm", "lr", "val_loss", "accuracy", "incident"]
    assert table["incident"].dropna().to_dict() == {3: "non-finite-input"}
    assert table.loc[5, "accuracy"] == 0.25  # a validation before step 5
    assert len(table) == 6


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs {package}: pip install {package}"):
        getattr(made_run(), f"to_{package}")()


def test_polars_too() -> None:
    polars = pytest.importorskip("polars")
    table = made_run(steps=300).to_polars()
    assert isinstance(table, polars.DataFrame)
    assert table.columns[:2] == ["step", "loss"]


def test_the_chart_of_a_cell_is_escaped() -> None:
    progress = DisplayedProgress()
    for step in range(10):
        progress.step(StepRow(step=step, loss=1.0 / (1 + step), grad_norm=1.0, lr=0.1), now=float(step))
    chart = notebook_chart(progress, "<script>", [Incident(step=3, cause="<i>", severity="warn")])
    assert chart.count("<polyline") == 3
    assert "&lt;script&gt;" in chart
    assert "<i>" not in chart
    assert "<script" not in chart


def test_hyperparameters_are_logged_and_compared(tmp_path: Path) -> None:
    for name, lr in (("a", 0.01), ("b", 0.02)):
        model, optimizer = parts()
        optimizer.param_groups[0]["lr"] = lr
        hparams = {"batch_size": 32, "model": {"depth": 2}, "data": Path("x")}
        with Guard(model, optimizer, config=QUIET, run_dir=tmp_path / name, hparams=hparams) as guard:
            train(guard, model)
    runs = [open_run(tmp_path / name) for name in "ab"]
    assert runs[0].hparams.items() >= {"optimizer": "AdamW", "lr": 0.01, "weight_decay": 0.01, "batch_size": 32}.items()
    assert (runs[0].hparams["betas"], runs[0].hparams["model.depth"], runs[0].hparams["data"]) == ([0.9, 0.95], 2, "x")
    assert compare(runs).settings == (("lr", ("0.01", "0.02")),)
    with pytest.raises(MisuseError, match="hparams must be a mapping"):
        Guard(*parts(), hparams=[("lr", 1)])  # type: ignore[arg-type]
