"""Output for programs: SARIF, annotations of GitHub Actions, and the causes that rules share with the diagnosis."""

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import Result
from typer.testing import CliRunner

from steadystep.cli.app import app
from steadystep.diagnosis import Cause
from steadystep.errors import ConfigError
from steadystep.lint import RULES, Hit, Report, check_script
from steadystep.lint.causes import CAUSES
from steadystep.lint.patch import apply, replacements
from steadystep.lint.repairs import edits
from steadystep.lint.sarif import as_github, as_sarif, uri_of
from tests.unit.lint.test_lint import FAULTY, SCRIPTS, report

LATE = (SCRIPTS / "develop/faulty/clip_after_step.py").read_text(encoding="utf-8")
SCHEMA = Path(os.environ.get("SARIF_SCHEMA", "sarif-schema-2.1.0.json"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def results(log: dict[str, Any]) -> list[dict[str, Any]]:
    (only,) = log["runs"]
    found: list[dict[str, Any]] = only["results"]
    return found


def place_of(result: dict[str, Any]) -> dict[str, Any]:
    (location,) = result["locations"]
    found: dict[str, Any] = location["physicalLocation"]
    return found


@pytest.fixture(scope="module")
def log() -> dict[str, Any]:
    """The frozen scripts of our own, a config and two problems, through JSON and back."""
    wrong = Hit(code="SS001", line=2, column=0, message="no such key?", severity="error", why="it is rejected")
    config = Report(path="a b/ü.yaml", kind="config", hits=(wrong,), source=("training:", "  x: 1"))
    reports = [report(row["path"]) for row in FAULTY]
    made = as_sarif([*reports, config, Report(path="runs/a", kind="run")], ["x.py: not Python", "y.py: gone"])
    read: dict[str, Any] = json.loads(json.dumps(made))
    return read


def test_the_essential_structure(log: dict[str, Any]) -> None:
    """What the standard and GitHub ask for. With SARIF_SCHEMA and jsonschema at hand, the schema decides too."""
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (only,) = log["runs"]
    rules = only["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [*RULES, "SS001"]
    for rule in rules:
        assert rule["name"]
        for text in (rule["shortDescription"]["text"], rule["fullDescription"]["text"], rule["help"]["text"]):
            assert len(text) > 10
        assert f"ignore[{rule['id']}]" in rule["help"]["markdown"]
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    for result in results(log):
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"].endswith(".")
        region = place_of(result)["region"]
        begin, end = (region["startLine"], region["startColumn"]), (region["endLine"], region["endColumn"])
        assert (1, 1) <= begin < end
    if SCHEMA.exists():
        jsonschema = pytest.importorskip("jsonschema")
        jsonschema.Draft4Validator(json.loads(SCHEMA.read_text())).validate(log)


def test_a_file_that_cannot_be_read_is_a_notification(log: dict[str, Any]) -> None:
    (invocation,) = log["runs"][0]["invocations"]
    assert not invocation["executionSuccessful"]
    assert [n["message"]["text"] for n in invocation["toolExecutionNotifications"]] == [
        "x.py: not Python",
        "y.py: gone",
    ]
    clean = as_sarif([])["runs"][0]
    assert clean["invocations"][0]["executionSuccessful"]
    assert clean["results"] == []


def test_a_region_is_the_faulty_expression() -> None:
    text = "# é\n" + LATE.replace("    torch.nn", '    "été"; norm = torch.nn')
    found = check_script(text)
    (result,) = results(as_sarif([found]))
    region = place_of(result)["region"]
    line = text.splitlines()[region["startLine"] - 1]
    assert region["startLine"] == region["endLine"]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    )


def test_the_region_of_a_loop_is_its_first_line() -> None:
    found = report("judge/faulty/graph_in_validation.py")
    (result,) = results(as_sarif([found]))
    region = place_of(result)["region"]
    assert region["startLine"] == region["endLine"] == found.hits[0].line
    assert region["endColumn"] == len(found.source[region["startLine"] - 1]) + 1


def test_fixes_give_what_the_diff_gives() -> None:
    """A reader of SARIF that replaces the regions gets the text that `--fix` writes."""
    seen = 0
    for row in FAULTY:
        text = (SCRIPTS / row["path"]).read_text(encoding="utf-8")
        found = report(row["path"])
        for hit, result in zip(found.hits, results(as_sarif([found])), strict=True):
            assert ("fixes" in result) == bool(hit.diff) == (result["properties"]["fix"] != "none")
            if hit.diff:
                (change,) = result["fixes"][0]["artifactChanges"]
                assert change["artifactLocation"] == place_of(result)["artifactLocation"]
                assert replaced(text, change["replacements"]) == apply(text, edits(hit))
                seen += 1
    assert seen > 40


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(
    "diff",
    ["@@ -2,1 +2,2 @@\n b\n+c", "@@ -2,1 +2,1 @@\n-b\n+c", "@@ -1,2 +1,2 @@\n+b\n a\n-b", "@@ -1,2 +1,1 @@\n-a\n b"],
)
def test_fixes_at_the_end_of_a_file(diff: str, end: str) -> None:
    hit = Hit(code="SS102", line=1, column=0, message="m", severity="error", why="w", diff="--- a\n+++ b\n" + diff)
    found = Report(path="x.py", kind="script", hits=(hit,), source=("a", "b"))
    (result,) = results(as_sarif([found]))
    got = replaced("a\nb" + end, result["fixes"][0]["artifactChanges"][0]["replacements"])
    assert got.removesuffix("\n") == (apply("a\nb", replacements(hit.diff)) or "").removesuffix("\n")


def replaced(text: str, changes: list[dict[str, Any]]) -> str:
    """A slow reader: regions to offsets, the last one first."""
    starts = [0, *(m.end() for m in re.finditer("\n", text))]
    for change in reversed(changes):
        region = change["deletedRegion"]
        begin = starts[region["startLine"] - 1] + region["startColumn"] - 1
        end = starts[region["endLine"] - 1] + region["endColumn"] - 1
        text = text[:begin] + change["insertedContent"]["text"] + text[end:]
    return text


def test_paths_are_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert uri_of("a b/ü#?.py") == "a%20b/%C3%BC%23%3F.py"
    assert uri_of("./src/../x.py") == "x.py"
    assert uri_of(str(tmp_path / "x.py")) == "x.py"
    assert uri_of("../y.py") == f"file://{tmp_path.parent}/y.py"
    odd = os.fsdecode(b"caf\xe9.py")
    assert unquote(uri_of(odd), errors="surrogateescape") == odd


def test_annotations() -> None:
    hit = Hit(code="SS102", line=1, column=2, message="50% of\na:b,c", severity="warning", why="w")
    advice = Hit(code="SS303", line=1, column=0, message="m", severity="advice", why="w", end_line=1, end_column=3)
    found = Report(path="a,b.py", kind="script", hits=(hit, advice), source=("abcdefgh",))
    assert as_github([found], ["x: gone"]).splitlines() == [
        "::warning file=a%2Cb.py,line=1,col=3,endLine=1,endColumn=9,title=SS102::50%25 of%0Aa:b,c (w)",
        "::notice file=a%2Cb.py,line=1,col=1,endLine=1,endColumn=4,title=SS303::m (w)",
        "::error::x: gone",
    ]


# The command


def test_formats_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LATE)
    sarif = run("train.py", "gone.py", "--format", "sarif")
    assert sarif.exit_code == 1
    (result,) = results(json.loads(sarif.stdout))
    assert (result["ruleId"], place_of(result)["artifactLocation"]["uri"]) == ("SS102", "train.py")
    assert sarif.stderr == "error: gone.py: no such file or directory\n"
    github = run("train.py", "gone.py", "--format", "github")
    assert github.stdout.startswith("::error file=train.py,line=15,col=5,")
    assert github.stdout.endswith("::error::gone.py: no such file or directory\n")
    assert run("train.py", "--json").stdout == run("train.py", "--format", "json").stdout
    assert run("train.py", "--format", "xml").exit_code == 2


def test_output_goes_to_a_file_and_text_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LATE)
    done = run("train.py", "--no-checklist", "--format", "sarif", "--output", "out.sarif")
    assert done.exit_code == 1
    assert done.stdout == run("train.py", "--no-checklist").stdout
    assert len(results(json.loads(Path("out.sarif").read_text()))) == 1
    for wrong in (["--output", "x"], ["--json", "--format", "sarif"], ["--json", "--output", "no/such/folder"]):
        assert isinstance(run("train.py", *wrong).exception, ConfigError)


def test_a_notebook_is_told_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text("{}")
    done = run(str(path))
    assert done.exit_code == 2
    assert "jupyter nbconvert --to script" in done.stderr


# Causes


def test_causes_are_those_of_the_diagnosis() -> None:
    assert set(CAUSES) <= set(RULES)
    assert set(CAUSES.values()) <= {cause.value for cause in Cause}
    assert CAUSES["SS106"] == Cause.MISSING_ZERO_GRAD


def test_hits_and_rules_carry_their_cause(log: dict[str, Any]) -> None:
    (hit,) = report("develop/faulty/no_zero_grad.py").hits
    assert hit.as_dict()["cause"] == hit.cause == "missing-zero-grad"
    for result in results(log):
        assert result["properties"].get("cause") == CAUSES.get(result["ruleId"])
    for rule in log["runs"][0]["tool"]["driver"]["rules"]:
        assert rule["properties"].get("cause") == CAUSES.get(rule["id"])
        assert (CAUSES.get(rule["id"], "no cause") in rule["help"]["text"]) == (rule["id"] in CAUSES)
