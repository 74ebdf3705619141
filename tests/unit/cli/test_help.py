"""Each verb explains itself, and a user's mistake is a message instead of a traceback."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from steadystep.cli import app as cli
from steadystep.errors import SteadystepError

VERBS = {
    "bench": ("Run", [["nothing"], ["stability", "--seeds", "x"]]),
    "check": ("Check", [["missing.py"], ["--select", "SS999", "missing.py"]]),
    "compare": ("Compare", [["a", "b"], []]),
    "dashboard": ("Serve", [["missing"], [".", "--port", "99999999"]]),
    "demo": ("Train", [["--steps", "3"], ["--seed", "x"]]),
    "diagnose": ("Diagnose", [["missing.csv"], [".", "--column", "loss"]]),
    "examine": ("Examine", [["nothing"], ["gpt", "--steps", "1"]]),
    "find-lr": ("Sweep", [["nothing"], ["gpt", "--steps", "1"]]),
    "mcp": ("Serve", [["missing"], ["--port"]]),
    "replay": ("Re-run", [["missing", "--factory", "a:b"], ["missing"]]),
    "report": ("Write", [["missing"], ["missing.csv", "--column", "="]]),
    "train": ("Train", [["missing.yaml"], []]),
}


def command(verb: str) -> Any:
    commands: dict[str, Any] = vars(typer.main.get_command(cli.app))["commands"]
    assert set(commands) == set(VERBS)
    return commands[verb]


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_it_does_and_gives_an_example(verb: str) -> None:
    text = command(verb).help or ""
    first = text.splitlines()[0]
    assert first.startswith(VERBS[verb][0])
    assert first.endswith(".")
    assert f"Example: steadystep {verb}" in text
    for parameter in command(verb).params:
        if parameter.name != "help":
            explained = getattr(parameter, "help", "")
            assert re.match(r"[A-Z].*\.$", explained, re.DOTALL), (parameter.name, explained)


@pytest.mark.parametrize(
    ("verb", "wrong"), [(verb, wrong) for verb, (_, all_wrong) in VERBS.items() for wrong in all_wrong]
)
def test_a_mistake_is_a_message(verb: str, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, [verb, *wrong])
    assert done.exit_code != 0
    assert isinstance(done.exception, SteadystepError | SystemExit)
    said = cli.told(done.exception) if isinstance(done.exception, SteadystepError) else done.output
    assert said.strip()
    assert "Traceback" not in said
