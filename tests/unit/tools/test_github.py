"""The files in .github: they parse, call what the Makefile has, pin their actions and hold no secret."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_all_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "tests", "wheel"]
    assert [path.stem for path in FORMS] == ["bug", "false_alarm", "feature"]
    assert yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/config.yml").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}, "more is given to the one job that needs it"
    assert "secrets." not in text
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert [action for action in used if not re.search(r"@(v\d+|release/v\d+)$", action)] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    called = re.findall(r"\bmake ([a-z-]+)", " ".join(step.get("run", "") for step in steps(workflow)))
    assert set(called) <= set(targets)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_tests_run_on_every_python_that_the_package_claims() -> None:
    matrix = yaml.safe_load((GITHUB / "workflows/tests.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert claimed
    assert set(claimed) <= set(matrix["python"])


def test_commands_of_the_pull_request_template() -> None:
    text = (GITHUB / "pull_request_template.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= set(targets)
    studies = re.search(r"for study in ([a-z ]+);", (ROOT / "Makefile").read_text())
    assert studies is not None
    assert set(re.findall(r"`steadystep bench ([a-z]+)`", text)) <= set(studies[1].split())
