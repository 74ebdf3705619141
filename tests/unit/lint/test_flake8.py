"""The flake8 plugin, run by flake8 itself."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from steadystep.lint.flake8 import Plugin

ROOT = Path(__file__).parents[3]
LATE = (ROOT / "tests/data/lint/develop/faulty/clip_after_step.py").read_text(encoding="utf-8")
# Found by its entry point, as by a user: named here as well, the plugin would report every hit twice.
CONFIG = "[flake8]\nselect = SS\n"


def flake8(text: str, folder: Path, *options: str) -> str:
    pytest.importorskip("flake8")
    (folder / "train.py").write_bytes(text.encode())
    (folder / "setup.cfg").write_text(CONFIG)
    command = [sys.executable, "-m", "flake8", "--config", "setup.cfg", *options, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout


def test_a_hit_has_its_place(tmp_path: Path) -> None:
    assert flake8(LATE, tmp_path) == "train.py:15:5: SS102 gradients are clipped after the update was made\n"
    assert flake8("\ufeff" + LATE.replace("\n", "\r\n"), tmp_path).startswith("train.py:15:5: SS102")


def test_comments_and_selection(tmp_path: Path) -> None:
    for comment in ("noqa", "noqa: SS102", "steadystep: ignore[SS102]"):
        assert not flake8(LATE.replace("1.0)", f"1.0)  # {comment}"), tmp_path)
    assert flake8(LATE.replace("1.0)", "1.0)  # noqa: SS101"), tmp_path)
    assert not flake8(LATE, tmp_path, "--extend-ignore", "SS1")


def test_what_is_no_fault_is_not_reported(tmp_path: Path) -> None:
    advice = "import torch.nn.functional as F\nloss = F.cross_entropy(F.log_softmax(model(x), 1), y)\n"
    assert not flake8(advice, tmp_path)
    assert not flake8("", tmp_path)
    assert "SS" not in flake8("for in x:\n", tmp_path)


def test_a_tree_that_is_too_deep_ends_quietly() -> None:
    assert list(Plugin(ast.parse(""), ["x = " + "(" * 5000 + ")" * 5000]).run()) == []


def test_the_entry_point_leads_to_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["flake8.extension"] == {"SS": "steadystep.lint.flake8:Plugin"}
    assert any(name.startswith("flake8") for name in project["optional-dependencies"]["dev"])
    assert import_module("steadystep.lint.flake8").Plugin is Plugin


def test_it_is_light() -> None:
    code = (
        "import sys, steadystep.lint.flake8 as f; list(f.Plugin(None, ['x = 1']).run())\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'rich', 'typer', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
