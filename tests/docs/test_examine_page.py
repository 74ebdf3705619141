"""The faulty programs of docs/examine.md are examined here as the page shows them, and get the causes it prints."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadystep.cli import app as cli

PAGE = (Path(__file__).parent.parent.parent / "docs" / "examine.md").read_text()
SHOWN = re.findall(r"^```console\n\$ steadystep (examine faulty_jobs:\w+)\n(.*?)^```", PAGE, re.M | re.S)


def causes(text: str) -> list[str]:
    return re.findall(r"^cause +(.*)$", text, re.M)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's folder, with the file that the page shows."""
    (block,) = [b for b in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "def double_softmax" in b]
    (tmp_path / "faulty_jobs.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_faulty_program_gets_the_cause_that_is_printed(command: str, shown: str) -> None:
    done = CliRunner().invoke(cli.app, command.split())
    assert done.exit_code == 1
    assert causes(done.stdout) == causes(shown)


def test_there_are_five() -> None:
    assert len(SHOWN) == 5
    assert len({tuple(causes(shown)) for _, shown in SHOWN}) == 5
    assert len(re.findall(r"^def \w+\(seed\):", PAGE, re.M)) == 5
