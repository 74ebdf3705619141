"""What a wheel would hold, without building one: everything of the package and nothing else."""

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "steadystep"
FILES = {
    path.relative_to(ROOT / "src").as_posix()
    for path in PACKAGE.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
DATA = sorted(name for name in FILES if not name.endswith(".py"))


def test_the_wheel_is_the_package() -> None:
    """hatchling leaves out what .gitignore names: a folder called `runs` or `build` would be missed here."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    assert {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()} == FILES


@pytest.mark.parametrize("name", DATA)
def test_data_is_found_where_the_package_is_installed(name: str) -> None:
    found = resources.files("steadystep").joinpath(*name.split("/")[1:])
    assert found.is_file()
    assert name.endswith("py.typed") or found.read_text()


def test_the_kinds_of_data() -> None:
    assert {name.rpartition(".")[2] for name in DATA} == {"typed", "pyi", "html", "css", "js"}
    assert {"steadystep/py.typed", "steadystep/__init__.pyi", "steadystep/pages/templates/report.html"} < FILES


def test_templates_named_in_the_code_are_there() -> None:
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    pages = "\n".join(path.read_text() for path in PACKAGE.rglob("*.html"))
    named = {*re.findall(r'"(\w+\.html)"', code), *re.findall(r'{% \w+ "(\w+\.html)"', pages)}
    assert {"report.html", "list.html", "frame.html"} <= named
    assert named <= {Path(name).name for name in DATA}


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/steadystep/version.py"
    setters = [path.name for path in PACKAGE.rglob("*.py") if re.search(r"^__version__ *=", path.read_text(), re.M)]
    assert setters == ["version.py"]
