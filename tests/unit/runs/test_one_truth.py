"""Terminal, `train`, `diagnose`, `report`, `compare` and the dashboard give the same numbers for the same run."""

import importlib
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from steadystep import Guard, faults
from steadystep._utils.text import number
from steadystep.pages import Library, report_page
from steadystep.runs import compare, open_run
from steadystep.runs.diagnosis import headline
from steadystep.runs.run import Run
from steadystep.tracking import Terminal
from tests.unit.pages.report_runs import steadystep

RUNS = ("healthy", "nan-refused", "rolled-back", "dead", "resumed", "killed")


def _train(folder: Path, *, steps: int = 160, fault: dict[str, Any] | None = None, **options: Any) -> str:
    """One small run; returns what its terminal shows at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    broken = faults.parse(fault or {"kind": "grad-scale", "at": 10**6}, model=model, optimizer=optimizer)
    data, weights = torch.Generator().manual_seed(1), torch.randn(8, 1, generator=torch.Generator().manual_seed(2))
    screen = io.StringIO()
    make = Guard.resume if options.pop("resumes", False) else Guard
    config = {"monitoring": {"sinks": []}, **options.pop("config", {})}
    sinks = [Terminal(Console(file=screen, width=200))]
    with make(model, optimizer, run_dir=folder, config=config, sinks=sinks, **options) as guard:

        def loss(batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(model(batch), (batch @ weights).tanh())

        for step in range(steps):
            batch = torch.randn(32, 8, generator=data)
            if step < guard.attempts:
                continue
            with broken.at(step):
                guard.step(loss, batch=broken.batch(step, batch))
            if step % 40 == 39:
                guard.validate(loss(torch.ones(1, 8)).item())
    return screen.getvalue()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """All runs, once, and what their terminals showed."""
    root, logger = tmp_path_factory.mktemp("runs"), logging.getLogger("steadystep")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    shown = {
        "healthy": _train(root / "healthy"),
        "nan-refused": _train(root / "nan-refused", fault={"kind": "bad-input", "at": [90, 92, 140]}),
        "rolled-back": _train(root / "rolled-back", fault={"kind": "bit-flip", "at": 100, "parameter": "0.weight"}),
        "dead": _train(root / "dead", fault={"kind": "bad-input", "at": 90}, config={"mode": "observe"}),
    }
    for steps in (60, 110, 110):
        _train(root / "resumed", steps=steps, resumes=True)
    _kill(root / "resumed", root / "killed")
    logger.setLevel(level)
    yield root, shown
    torch.set_num_threads(threads)


def _kill(folder: Path, to: Path) -> None:
    """The same log, of a process that has died before it could write an end."""
    code = "import json; from steadystep._utils import this_process; print(json.dumps(this_process()))"
    gone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line.get("kind") != "end"]
    lines = [line | {"process": json.loads(gone)} if line.get("kind") == "start" else line for line in lines]
    to.mkdir()
    (to / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def library(places: tuple[Path, dict[str, str]]) -> Library:
    made = Library(places[0])
    made.summaries()
    made.read_all()
    return made


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    steadystep(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def _same(told: Any, truth: float | None) -> bool:
    """A number of JSON against ours: NaN is text there."""
    if truth is None or told is None:
        return told is truth
    return float(told) == truth or (math.isnan(float(told)) and math.isnan(truth))


@pytest.mark.parametrize("name", RUNS)
def test_every_view_shows_the_same_numbers(
    places: tuple[Path, dict[str, str]], library: Library, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, shown = places
    run = open_run(root / name)
    truth, verdict = run.numbers(), headline(run)

    told = _json(capsys, "diagnose", str(root / name))
    assert {k: told["numbers"][k] for k in truth if not isinstance(truth[k], float)} == {
        k: v for k, v in truth.items() if not isinstance(v, float)
    }
    assert all(_same(told["numbers"][k], v) for k, v in truth.items() if isinstance(v, float))
    assert (told["verdict"], told["healthy"], told["cause"]) == (verdict.said, verdict.healthy, verdict.cause)

    other = "healthy" if name != "healthy" else "nan-refused"
    standing = _json(capsys, "compare", str(root / name), str(root / other))["runs"][0]
    assert _same(standing["loss"], truth["final_loss"])
    assert _same(standing["best_val_loss"], truth["best_validation"])
    assert _same(standing["val_loss"], truth["last_validation"])
    counts = ("incidents", "interventions", "skipped", "rollbacks")
    assert [standing[k] for k in ("incidents", "interventions", "refused", "rollbacks")] == [truth[k] for k in counts]

    row = next(one for one in library.summaries() if one.key == name)
    assert (row.said, row.healthy, row.steps) == (verdict.said, verdict.healthy, truth["steps"])
    assert (row.incidents, row.interventions) == (truth["incidents"], truth["interventions"])
    assert _same(row.loss, truth["final_loss"])
    assert _same(row.val_loss, truth["last_validation"])
    assert row.state() == told["status"]

    facts = _facts(report_page(run))
    assert facts["interventions"] == str(truth["interventions"])
    assert facts["updates skipped"] == str(truth["skipped"])
    assert facts["final loss"] == number(run.final_loss)
    assert facts["best validation"] == number(run.best_validation)
    if name in shown:
        counted = re.search(r"(\d+) incidents?", shown[name].splitlines()[-1])
        assert int(counted[1]) if counted else truth["incidents"] == 0


def _facts(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>([^<]*)", page))


def test_train_reports_what_the_log_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also when a finished run is resumed: nothing is validated again, and the best validation stays."""
    config = {"task": "regression", "validation_frequency": 25, "training": {"total_steps": 60}}
    config |= {"monitoring": {"sinks": []}, "faults": [{"kind": "bad-input", "at": [40, 41]}]}
    (tmp_path / "a.yaml").write_text(json.dumps(config))
    arguments = ("train", str(tmp_path / "a.yaml"), "--run-dir", str(tmp_path / "a"))
    told = _json(capsys, *arguments)
    again = _json(capsys, *arguments, "--resume")
    run = open_run(tmp_path / "a")
    assert told["interventions"] == told["incidents"] == run.num_interventions == 1
    for summary in (told, again):
        assert (summary["final_loss"], summary["verdict"]) == (run.final_loss, headline(run).said)
        assert (summary["validation"], summary["best_validation"]) == (run.last_validation, run.best_validation)
    assert again["trained"] == 0
    assert len(run.validation["val_loss"]) == 3


def test_what_became_of_them(places: tuple[Path, dict[str, str]]) -> None:
    runs: dict[str, Run] = {name: open_run(places[0] / name) for name in RUNS}
    told = {name: (run.num_incidents, run.num_interventions, run.status()) for name, run in runs.items()}
    assert told == {
        "healthy": (0, 0, "finished"),
        "nan-refused": (2, 2, "finished"),  # steps 90 and 92 are one
        "rolled-back": (1, 1, "finished"),
        "dead": (1, 0, "finished"),
        "resumed": (0, 0, "finished"),
        "killed": (0, 0, "stale"),  # its log is seconds old, but its process is gone
    }
    assert runs["rolled-back"].num_rollbacks == 1
    assert math.isnan(runs["dead"].final_loss or 0.0)
    assert [headline(runs[name]).healthy for name in ("healthy", "nan-refused", "dead")] == [True, True, False]
    assert len(runs["resumed"].validation["val_loss"]) == 2


def test_a_run_that_is_lost_is_not_ahead(places: tuple[Path, dict[str, str]]) -> None:
    compared = compare([open_run(places[0] / name) for name in ("dead", "healthy", "nan-refused")])
    assert "dead ended without a finite training loss" in compared.said
    assert "dead is" not in compared.said
    assert math.isnan(compared.runs[0].score or 0.0)


def test_a_dead_run_has_no_green_dot(library: Library) -> None:
    from starlette.testclient import TestClient

    from steadystep.pages import make_app

    rows = {row["key"]: row for row in TestClient(make_app(library)).get("/api/runs").json()["rows"]}
    assert rows["healthy"]["dot"] == "finished"
    assert rows["dead"]["dot"] == "stopped"
    assert rows["dead"]["tag"] != ["healthy", "good"]


SLOW = """
from types import SimpleNamespace
import torch

def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    loss = lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()
    batches = [torch.randn(16, 4) for _ in range(24)]
    return SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-7), loss=loss, batches=batches
    )
"""


@pytest.mark.slow
def test_the_same_cause_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`guard.examine` leads; `guard.diagnose`, `steadystep examine`, `steadystep diagnose` and the report follow."""
    (tmp_path / "slow_job.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    job = importlib.import_module("slow_job").make(0)
    monkeypatch.setattr(logging.getLogger("steadystep"), "level", logging.ERROR)
    with Guard(job.model, job.optimizer, run_dir=tmp_path / "slow", config={"monitoring": {"sinks": []}}) as guard:
        for batch in job.batches * 8:
            guard.step(job.loss, batch=batch)
        examined = guard.examine(job.batches, num_steps=10).causes[0]
        assert guard.diagnose()[0] == examined
    assert examined.cause == "learning-rate-too-low"
    told = _json(capsys, "diagnose", str(tmp_path / "slow"))
    assert told["cause"] == told["findings"][0]["kind"] == examined.cause
    assert "learning rate is too low" in told["verdict"]
    assert f'<span class="tag warn">{examined.cause}</span>' in report_page(open_run(tmp_path / "slow"))
    tried = _json(capsys, "examine", "slow_job:make", "--after", "192", "--steps", "10")
    assert tried["causes"][0]["cause"] == examined.cause


def test_a_shift_of_the_data_is_in_every_view(tmp_path: Path) -> None:
    """The guard's diagnosis comes first even if it only watched."""
    log = tmp_path / "run.jsonl"
    lines: list[dict[str, Any]] = [{"kind": "start", "settings": {"mode": "autopilot"}}]
    lines += [{"step": i, "loss": 1.0 / (1 + i / 20), "norm": 1.0, "lr": 0.1} for i in range(200)]
    finding = {"detector": "loss-spike", "severity": "warn", "what": "the loss rose"}
    diagnosis = {"cause": "data-shift", "evidence": "the loss rose", "advice": "", "findings": [finding]}
    lines.insert(150, {"kind": "incident", "step": 149, "stepped": True, "diagnosis": diagnosis})
    lines += [{"kind": "verdict", "step": None, "cause": "data-shift", "evidence": "the loss rose"}, {"kind": "end"}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = headline(open_run(tmp_path))
    assert (told.cause, told.healthy) == ("data-shift", False)
    assert "data-shift" in told.said


@pytest.mark.parametrize(
    ("process", "status"), [({}, "running"), ({"pid": os.getpid(), "host": "elsewhere"}, "running")]
)
def test_an_unknown_process_counts_as_alive_while_its_log_grows(process: dict[str, Any], status: str) -> None:
    run = Run(name="a", path=Path("a"), source="steadystep", ended=False, process=process)
    assert run.status(changed=1000.0, now=1010.0) == status
    assert run.status(changed=1000.0, now=2000.0) == "stale"


@pytest.mark.parametrize(("later", "recovered"), [(3.0, False), (0.02, True)])
def test_a_rate_that_was_too_high_is_recovered_from_only_if_the_loss_has_fallen(
    later: float, recovered: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
    weights = torch.randn(20, 5)
    with Guard(model, optimizer, run_dir=tmp_path, config={"monitoring": {"sinks": []}}) as guard:
        for step in range(200):
            x = torch.randn(32, 20)
            if step == 20:
                optimizer.param_groups[0]["lr"] = later
            guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch=(x, (x @ weights).argmax(1)))
        assert guard.diagnose()[0].cause == "learning-rate-too-high"
    told = headline(open_run(tmp_path))
    assert told.said.startswith("Recovered") == recovered
    assert told.healthy == recovered
