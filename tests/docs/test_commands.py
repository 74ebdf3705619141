"""What the documents tell a reader to type is typed here, as written, in a folder like the reader's."""

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steadystep._utils.text import quiet_log
from steadystep.cli.app import app

ROOT = Path(__file__).parent.parent.parent
BY_HAND = {
    # what takes minutes, or changes the machine; `test_make_targets_named_in_the_documents_exist` knows the targets
    r"pip install .*": "tests/release installs the wheel",
    r"make .*": "the targets are what CI and the one who releases run",
    r"steadystep bench (detection|recovery|overhead|stability)": "half an hour each; tests/unit has --quick",
    r"steadystep bench stability --(quick|json)": "minutes where results are missing",
    r"python benchmarks/oracle.py": "tests/unit/lab compares one of its runs; needs a checkout",
    r"torchrun .*": "tests/distributed, in `make test-all`",
    r"python tools/step_calls.py": "needs a checkout; tests/docs/test_walk.py has its step",
    r"python -c .*scorecard.*": "21 faults, twice: half a minute of an idle machine",
}


def commands() -> list[tuple[str, str, tuple[str, ...]]]:
    """Document, command and the lines that it shows below it."""
    found = []
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]):
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.M | re.S):
            if language == "sh":
                found += [(path.name, _bare(line), ()) for line in block.splitlines() if line.strip()]
            elif language in ("", "console", "text"):
                for typed in re.findall(r"^\$ (.*\n(?:(?!\$ ).*\n?)*)", block, re.M):
                    first, *shown = typed.splitlines()
                    found.append((path.name, _bare(first), tuple(line for line in shown if line.strip())))
    return found


def _bare(line: str) -> str:
    return re.sub(r"\s+# .*", "", line).strip()


QUICK = [  # what several pages show is typed once
    pytest.param(command, shown, id=f"{name}: {command}")
    for (command, shown), name in {(command, shown): name for name, command, shown in reversed(commands())}.items()
    if not any(re.fullmatch(pattern, command) for pattern in BY_HAND)
][::-1]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=folder, env=_surroundings(), capture_output=True, text=True)


def typed_here(command: str) -> subprocess.CompletedProcess[str]:
    """The same in this process: one of its own imports torch, for seconds."""
    with pytest.MonkeyPatch.context() as patch, quiet_log():
        patch.setenv("COLUMNS", _surroundings()["COLUMNS"])
        patch.setattr("typer.launch", lambda address: 0)
        patch.syspath_prepend(str(Path.cwd()))
        words = shlex.split(command)[1:]
        patch.setattr(sys, "argv", ["steadystep", *words])
        result = CliRunner().invoke(app, words)
    for name in ("faulty_jobs", "training", "my_run"):  # modules of that folder
        sys.modules.pop(name, None)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)


def _surroundings() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "BROWSER": "true", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def block_of(document: str, containing: str) -> str:
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    return next(block for block in found if containing in block)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A reader's folder, with what the documents have had them make by then."""
    folder = tmp_path_factory.mktemp("desk")
    here = Path.cwd()
    os.chdir(folder)
    try:
        (folder / "train.py").write_text(block_of("docs/tutorial.md", "class Surprise"))
        bundle = block_of("docs/incidents.md", 'Path("run/incidents")')
        unguarded = block_of("docs/incidents.md", "def make_unguarded")
        made = re.findall(r"^def make\w*\(\):\n(?:    .*\n)+", bundle + unguarded, re.M)
        (folder / "training.py").write_text("import torch\nfrom torch import nn\n\n\n" + "\n\n".join(made))
        (folder / "faulty_jobs.py").write_text(block_of("docs/examine.md", "def double_softmax"))
        first = block_of("docs/quickstart.md", 'run_dir="runs/first"')
        for name in ("first", "a", "b"):
            (folder / "made_run.py").write_text(first.replace("runs/first", f"runs/{name}"))
            with quiet_log():
                runpy.run_path("made_run.py")
        for block in (bundle, unguarded):
            (folder / "made_run.py").write_text(block)
            with quiet_log():
                runpy.run_path("made_run.py")
        (folder / "made_run.py").unlink()
        settings = re.search(r"^```yaml\n(mode: .*?)^```", (ROOT / "docs" / "config.md").read_text(), re.M | re.S)
        assert settings is not None
        (folder / "run.yaml").write_text(settings.group(1))
        for name in ("examples", "benchmarks/results", "tests/data/lint/develop"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copytree(ROOT / "examples", folder / "src")
        assert run("steadystep train --new my_run", folder).returncode == 0
        yield folder
    finally:
        os.chdir(here)


LONG = [
    *(f"examine faulty_jobs:{name}" for name in ("rate_too_high", "raw_features", "no_mask", "old_head")),
    *("python examples/base_loop.py", "python examples/guard.py"),  # tests/examples runs both
]


def _marked(case: Any) -> Any:
    """Of five examinations one is quick enough to show that the page is true."""
    is_long = any(command in case.id for command in LONG)
    return pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) if is_long else case


@pytest.mark.parametrize(("command", "shown"), [_marked(case) for case in QUICK if "dashboard" not in case.id])
def test_a_command_does_what_is_shown(command: str, shown: tuple[str, ...], desk: Path) -> None:
    if "--new" in command:
        (desk / "my_run.py").unlink()
        (desk / "my_run.yaml").unlink()
    # `check src/` stands for all that the command is installed under its name
    done = (
        run(command, desk) if command == "steadystep check src/" or command.startswith("diff") else typed_here(command)
    )
    # 1: `check`, `examine` and `replay` have found something, `diff` a difference
    finds = command.startswith(("diff ", "steadystep replay")) or "/faulty/" in command or "check train.py" in command
    finds = finds or "examine faulty_jobs:" in command
    assert done.returncode in ((0, 1) if finds else (0,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    said = done.stdout.split()
    for line in shown:
        assert line.split()[0] in said, f"{line!r} is shown, and this was said:\n{done.stdout}"


@pytest.mark.parametrize(("command", "shown"), [case for case in QUICK if "dashboard" in case.id])
def test_the_dashboard_serves_until_it_is_interrupted(command: str, shown: tuple[str, ...], desk: Path) -> None:
    # why another port: somebody may have one open at the usual place
    typed = [*command.split(), "--port", "0"]
    with subprocess.Popen(typed, cwd=desk, env=_surroundings(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.split()[1:] == shown[0].split()[1:]
            with urllib.request.urlopen(said.split()[0]) as page:
                assert b"steadystep" in page.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_every_reason_to_leave_one_out_is_used() -> None:
    typed = [command for _, command, _ in commands()]
    for pattern in BY_HAND:
        assert any(re.fullmatch(pattern, command) for command in typed), pattern
