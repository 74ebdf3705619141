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


def flake8(folder: Path, *texts: str, options: tuple[str, ...] = ()) -> str:
    """What it prints about these scripts, in one run: it takes a second to start."""
    pytest.importorskip("flake8")
    for number, text in enumerate(texts):
        (folder / f"train{number}.py").write_bytes(text.encode())
    (folder / "setup.cfg").write_text(CONFIG)
    command = [sys.executable, "-m", "flake8", "-j1", "--config", "setup.cfg", *options]
    done = subprocess.run(
        [*command, *(f"train{number}.py" for number in range(len(texts)))], cwd=folder, capture_output=True, text=True
    )
    assert not done.stderr
    return done.stdout


def test_a_hit_has_its_place(tmp_path: Path) -> None:
    marked = "\ufeff" + LATE.replace("\n", "\r\n")
    first, second = flake8(tmp_path, LATE, marked).splitlines()
    assert first == "train0.py:15:5: SS102 gradients are clipped after the update was made"
    assert second.startswith("train1.py:15:5: SS102")


def test_comments_and_selection(tmp_path: Path) -> None:
    comments = ("noqa", "noqa: SS102", "steadystep: ignore[SS102]", "noqa: SS101")
    hits = flake8(tmp_path, *(LATE.replace("1.0)", f"1.0)  # {comment}") for comment in comments)).splitlines()
    assert [hit.split(":")[0] for hit in hits] == ["train3.py"]
    assert not flake8(tmp_path, LATE, options=("--extend-ignore", "SS1"))


def test_what_is_no_fault_is_not_reported(tmp_path: Path) -> None:
    advice = "import torch.nn.functional as F\nloss = F.cross_entropy(F.log_softmax(model(x), 1), y)\n"
    assert "SS" not in flake8(tmp_path, advice, "", "for in x:\n")


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
