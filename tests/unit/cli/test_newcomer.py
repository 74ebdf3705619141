"""What somebody sees who lost a run to a NaN, installed the package without extras and has one bad sample per epoch."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import steadystep
from steadystep.cli.app import app
from steadystep.lint import check_script
from steadystep.pages.incident_groups import headline
from steadystep.runs.checklist import asked_rates
from steadystep.runs.open import open_run

BAD = (52, 82, 139)


def trained(folder: Path, *, mode: str = "autopilot") -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    settings = {"mode": mode, "monitoring": {"sinks": []}}
    with steadystep.Guard(model, torch.optim.AdamW(model.parameters()), run_dir=folder, config=settings) as guard:
        for step in range(192):
            x = torch.randn(16, 8)
            y = x.sum(-1)
            if step in BAD:
                x[3, 2] = torch.nan
            guard.step(lambda x, y=y: (model(x).squeeze(-1) - y).square().mean(), batch=x)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    trained(folder)
    return folder


def test_nan_that_were_all_refused_are_no_trouble(run_dir: Path) -> None:
    verdict = headline(open_run(run_dir))
    assert verdict.healthy
    assert verdict.said.startswith("Recovered: the guard intervened 3 times (non-finite-input at step 52,")


def test_one_that_was_not_refused_is(run_dir: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "run.jsonl").read_text().splitlines()]
    kept = [row for row in rows if not (row.get("kind") == "incident" and row.get("step") == BAD[1])]
    assert len(kept) == len(rows) - 1
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert not headline(open_run(tmp_path)).healthy


def test_diagnose_tells_what_the_guard_did_and_not_what_one_would_have_done(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(run_dir), "--notes"])
    assert done.exit_code == 0
    assert "steps 52, 82, 139: non-finite-input, 3 times" in done.output  # alike: told once
    assert done.output.count("done:   update skipped") == 1
    assert "origin: " in done.output
    assert f"replay: steadystep replay {run_dir}/incidents/incident-000052-skip --factory " in done.output
    assert "try:    the guard skipped the update; clean the data" in done.output
    assert "would have" not in done.output
    assert "--notes" not in done.output


def test_a_skipped_update_is_not_at_the_learning_rate(run_dir: Path) -> None:
    assert asked_rates(open_run(run_dir))[1] == 0.0


def test_a_second_run_in_the_same_folder_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "steadystep"):
        trained(tmp_path)
        assert "already contains a run" not in caplog.text
        trained(tmp_path)
    assert caplog.text.count("already contains a run") == 1


@pytest.mark.parametrize("command", [["report", "RUN"], ["compare", "RUN", "RUN", "--out", "both.html"]])
def test_pages_need_no_web_server(command: list[str], run_dir: Path, tmp_path: Path) -> None:
    without = "import sys; sys.modules.update(starlette=None, uvicorn=None); from steadystep.cli.app import app; app()"
    typed = [str(run_dir) if word == "RUN" else word for word in command]
    done = subprocess.run([sys.executable, "-c", without, *typed], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestChecklist:
    LOOP = "for x in data:\n    opt.zero_grad()\n    loss = model(x).mean()\n    loss.backward()\n    opt.step()\n"

    def item(self, script: str, name: str) -> tuple[str, str]:
        found = next(item for item in check_script(script).items if item.name == name)
        return found.state, found.evidence

    @pytest.mark.parametrize(
        "line",
        [
            "import steadystep\nw = steadystep.watch(model, optimizer)\n",
            "from steadystep import watch\nw = watch(model, optimizer)\n",
            "from steadystep.integrations.transformers import StabilityCallback\nc = [StabilityCallback()]\n",
        ],
    )
    def test_a_watcher_is_a_guard(self, line: str) -> None:
        assert self.item(line + self.LOOP, "NaN check") == ("present", "the guard checks every update")

    def test_somebody_elses_watch_is_none(self) -> None:
        assert self.item("import wandb\nwandb.watch(model)\n" + self.LOOP, "NaN check")[0] == "absent"

    def test_a_look_after_the_loop_comes_too_late(self) -> None:
        assert self.item(self.LOOP + "assert not loss.isnan()\n", "NaN check")[0] == "partial"
        inside = self.LOOP.replace("    loss.backward", "    assert not loss.isnan()\n    loss.backward")
        assert self.item(inside, "NaN check")[0] == "present"
        helper = "def fine(loss):\n    return loss.isfinite()\n" + self.LOOP
        assert self.item(helper, "NaN check")[0] == "present"

    def test_a_folder_alone_holds_no_checkpoints(self) -> None:
        made = "import steadystep\nguard = steadystep.Guard{}(model, optimizer, run_dir='runs/a'{})\n"
        loop = "for x in data:\n    guard.step(lambda: model(x).mean())\n"
        assert self.item(made.format("", "") + loop, "checkpoints")[0] == "absent"
        assert self.item(made.format(".resume", "") + loop, "checkpoints")[0] == "present"
        asked = ", config={'monitoring': {'save_checkpoints': True}}"
        assert self.item(made.format("", asked) + loop, "checkpoints")[0] == "present"
