"""`steadystep examine`: text, JSON and exit codes, with factories in a file of the user's."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadystep.cli import app as cli
from steadystep.errors import ConfigError

FACTORIES = """
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional


def _made(lr, targets=lambda y: y):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    way = torch.randn(8, 3)
    batches = [(x, targets((x @ way).argmax(1))) for x in torch.randn(9, 32, 8)]
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: functional.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
    )


def healthy(seed):
    return _made(1e-2)


def constant(seed):
    return _made(1e-2, torch.zeros_like)


def not_finite(seed):
    job = _made(1e-2)
    plain = job.loss
    job.loss = lambda batch: plain(batch) * float("nan")
    return job


def raises(seed):
    job = _made(1e-2)
    job.loss = lambda batch: 1 / 0
    return job


def empty(seed):
    job = _made(1e-2)
    job.batches = []
    return job
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a module of factories; its name, which no other test has imported."""
    name = f"factories_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def typed(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["examine", *arguments, "--steps", "12"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_a_healthy_job_exits_with_0(here: str) -> None:
    code, said = typed(f"{here}:healthy")
    assert code == 0
    assert said.startswith("cause       healthy\nevidence    it learns; as it is: ")
    assert "everything is put back" in said.splitlines()[-1]


def test_a_fault_exits_with_1_and_is_named(here: str) -> None:
    code, said = typed(f"{here}:constant")
    assert code == 1
    first, second, third, *_ = said.splitlines()
    assert first == "cause       no-learning (constant-targets)"
    assert second.startswith("evidence    all ")
    assert third.startswith("try         check how targets are made")


def test_json_is_for_programs(here: str) -> None:
    code, said = typed(f"{here}:healthy", "--json")
    assert code == 0
    told = json.loads(said)
    assert set(told) == {"causes", "trials", "repeatable", "skipped", "num_updates", "seconds"}
    assert told["trials"][0]["name"] == "as-is"
    assert told["trials"][0]["end"] < told["trials"][0]["start"]
    code, said = typed(f"{here}:constant", "--json")
    assert code == 1
    assert "constant-targets" in json.dumps(json.loads(said)["causes"])


def test_causes_in_json_are_objects(here: str) -> None:
    _, said = typed(f"{here}:constant", "--json")
    assert json.loads(said)["causes"][0]["fault"] == "constant-targets"


def test_a_loss_that_is_not_finite_is_valid_json(here: str) -> None:
    def refused(word: str) -> None:
        raise AssertionError(word)

    code, said = typed(f"{here}:not_finite", "--json")
    assert code == 1
    json.loads(said, parse_constant=refused)


def test_training_first(here: str) -> None:
    _, plain = typed(f"{here}:healthy", "--json")
    _, later = typed(f"{here}:healthy", "--after", "20", "--json")
    assert json.loads(later)["trials"][0]["start"] < json.loads(plain)["trials"][0]["start"]


def test_options_reach_the_trials(here: str) -> None:
    _, said = typed(f"{here}:healthy", "--max-grad-norm", "1e-9", "--json")
    names = [trial["name"] for trial in json.loads(said)["trials"]]
    assert "no-clipping" in names
    _, again = typed(f"{here}:healthy", "--seed", "0", "--json")
    _, other = typed(f"{here}:healthy", "--seed", "1", "--json")
    assert json.loads(again)["trials"] != json.loads(other)["trials"]


@pytest.mark.parametrize("wrong", ["missing_module:make", "{here}:missing", "nothing", "{here}:empty"])
def test_what_cannot_be_run_exits_with_2(
    here: str, wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["steadystep", "examine", wrong.format(here=here), "--steps", "12"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code == 2
    assert "Traceback" not in said.err
    assert said.err.strip() or said.out.strip()


def test_an_error_of_the_users_loss_is_not_swallowed(here: str) -> None:
    with pytest.raises(ZeroDivisionError):
        typed(f"{here}:raises")


def test_a_wrong_task_names_what_is_right(here: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:factory"):
        typed("gtp")
