"""The wheel that people get: built as they would build it, installed where nothing of this checkout can be seen."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import steadystep

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path) -> str:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=settings, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without isolation: a build environment of its own would be filled from the network."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")  # made from the archive of sources, which must therefore be whole
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment that holds this wheel and borrows its dependencies from the present one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"),
        *("install", "--quiet", "--no-index", "--no-deps", wheel),
        cwd=folder,
    )
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # why: a .pth adds this folder but does not read the .pth files in it, so an editable install stays unseen
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (described,) = (name for name in names if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(described).decode())
    assert {name.split("/")[0] for name in names} == {"steadystep", described.split("/")[0]}
    for folder in ("pages/templates/report.html", "pages/assets/run.js", "pages/templates/list.html", "py.typed"):
        assert f"steadystep/{folder}" in names
    assert not [name for name in names if re.search(r"(^|/)(tests?|benchmarks|examples|__pycache__)/", name)]
    assert (metadata["Name"], metadata["Version"]) == ("steadystep", steadystep.__version__)
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "](docs/" not in metadata.get_payload()  # tools/index_readme.py: no link that an index cannot follow


def test_it_is_this_one_and_it_is_light(installed: Path, tmp_path: Path) -> None:
    look = "import sys, steadystep; print(steadystep.__file__, 'torch' in sys.modules)"
    place, heavy = run(installed / "bin" / "python", "-c", look, cwd=tmp_path).split()
    assert Path(place).is_relative_to(installed)
    assert heavy == "False"


@pytest.mark.parametrize("command", [["steadystep"], ["python", "-m", "steadystep"]])
def test_the_command(installed: Path, tmp_path: Path, command: list[str]) -> None:
    program = [installed / "bin" / command[0], *command[1:]]
    assert run(*program, "--version", cwd=tmp_path) == f"steadystep {steadystep.__version__}\n"
    said = run(*program, "--help", cwd=tmp_path)
    for verb in ("demo", "train", "check", "report", "dashboard"):
        assert verb in said


def test_flake8_finds_the_rules(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("flake8")
    assert "steadystep" in run(installed / "bin" / "python", "-m", "flake8", "--version", cwd=tmp_path)
    (tmp_path / "train.py").write_text((ROOT / "tests/data/lint/develop/faulty/clip_after_step.py").read_text())
    said = run(installed / "bin" / "python", "-m", "flake8", "--exit-zero", "--select", "SS", "train.py", cwd=tmp_path)
    assert said.startswith("train.py:15:5: SS102 ")


def test_the_demo(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "bin" / "steadystep", "demo", "--steps", "70", cwd=tmp_path)
    assert "Three runs, the same data" in said
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert "<style>" in page
    assert "<script" in page
