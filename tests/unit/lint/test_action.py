"""The GitHub Action: its file, and its commands run here as a runner would run them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step.get("name", step.get("uses")): step for step in ACTION["runs"]["steps"]}
FAULTY = ROOT / "tests/data/lint/develop/faulty/clip_after_step.py"


def test_what_a_composite_action_needs() -> None:
    assert ACTION["name"]
    assert ACTION["description"]
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS.values():
        assert ("uses" in step) != ("run" in step and "shell" in step)
        assert re.fullmatch(r"[\w/-]+@v\d+", step.get("uses", "a@v1"))


def test_every_expression_leads_somewhere() -> None:
    text = (ROOT / "action.yml").read_text()
    assert set(re.findall(r"\binputs\.([\w-]+)", text)) == set(ACTION["inputs"])
    ids = {step["id"] for step in STEPS.values() if "id" in step}
    assert set(re.findall(r"\bsteps\.(\w+)\.", text)) == ids
    written = set(re.findall(r'echo "(\w+)=', STEPS["Check"]["run"]))
    assert set(re.findall(r"steps\.check\.outputs\.(\w+)", text)) == written == set(ACTION["outputs"])


def test_inputs_reach_a_shell_as_variables_only() -> None:
    for step in STEPS.values():
        assert "${{" not in step.get("run", "")


def test_what_it_installs_are_dependencies_of_ours() -> None:
    named = STEPS["Install"]["run"].split('/steadystep" ')[-1].split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {re.split(r"[<>=!]", name)[0] for name in project["dependencies"]}
    assert set(named) <= ours
    assert "torch" not in named


def perform(name: str, folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """A step as the runner performs it: bash, stop at the first error."""
    temporary = folder / "temp"
    temporary.mkdir(exist_ok=True)
    package = temporary / "steadystep"
    if not package.exists():
        package.mkdir()
        (package / "steadystep").symlink_to(ROOT / "src" / "steadystep")
    inputs = {key: str(value["default"]) for key, value in ACTION["inputs"].items()} | given
    values = {f"inputs.{key}": value for key, value in inputs.items()}
    values |= {"steps.python.outputs.python-path": sys.executable, "runner.temp": str(temporary)}
    values |= {f"steps.check.outputs.{key}": value for key, value in outputs(folder).items()}
    surroundings = {key: fill(value, values) for key, value in STEPS[name].get("env", {}).items()}
    surroundings |= {"RUNNER_TEMP": str(temporary), "GITHUB_OUTPUT": str(folder / "output")}
    return subprocess.run(
        [shutil.which("bash") or "bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", STEPS[name]["run"]],
        cwd=folder,
        env={**os.environ, **surroundings},
        capture_output=True,
        text=True,
    )


def fill(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\${{ ([\w.-]+) }}", lambda found: values[found[1]], text)


def outputs(folder: Path) -> dict[str, str]:
    path = folder / "output"
    return dict(line.split("=", 1) for line in path.read_text().splitlines()) if path.exists() else {}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("given", "hits", "status"),
    [
        pytest.param({"paths": "train.py"}, 1, "1", marks=pytest.mark.slow),
        ({"paths": "train.py", "ignore": "SS102"}, 0, "0"),
        pytest.param({"paths": "clean gone.py", "select": "SS1"}, 0, "2", marks=pytest.mark.slow),
        ({}, 1, "1"),
    ],
)
def test_its_commands(given: dict[str, str], hits: int, status: str, tmp_path: Path) -> None:
    shutil.copy(FAULTY, tmp_path / "train.py")
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "a.py").write_text("x = 1\n")
    (tmp_path / "temp").mkdir()
    done = perform("Check", tmp_path, **given)
    assert done.returncode == 0, done.stderr
    told = outputs(tmp_path)
    assert told["status"] == status
    found = json.loads(Path(told["sarif"]).read_text())["runs"][0]["results"]
    assert len(found) == hits
    assert done.stdout.count("::error file=train.py,line=15") == hits
    assert perform("Result", tmp_path).returncode == int(status)
